// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps tensors in files, as a log of blocks that is read from its end.
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tiers/spill/spill.h"
#include "tiers/spill/spilled_form.h"
#include "tiers/staging.h"

namespace deeptide::tiers {

using at::Tensor;

namespace {

constexpr int64_t kAlignment = 64;     // of tensors within a block
constexpr int64_t kBlocksAtOnce = 16;  // that the files grow by
constexpr const char* kWhat = "activations";

/// A block in memory as long as this lives.
class OpenBlock {
 public:
  OpenBlock(Staging& staging, Staging::Key key, const DiskPlace& place, bool keep_values, bool changes)
      : staging_(staging), key_(key), changes_(changes), memory_(staging.open(key, place, keep_values, kWhat)) {}
  ~OpenBlock() { staging_.close(key_, changes_); }
  OpenBlock(const OpenBlock&) = delete;

  Tensor part(int64_t begin, int64_t count) const { return memory_.narrow(0, begin, count); }

 private:
  Staging& staging_;
  Staging::Key key_;
  bool changes_;
  Tensor memory_;
};

class FileSpill final : public Spill {
 public:
  FileSpill(const OffloadOptions& options, const std::shared_ptr<device::Ledger>& ledger, at::Device device)
      : file_(options.folders),
        staging_(io::make_queue(options.num_slots), options.num_slots, ledger,
                 device.is_cpu() ? device::Role::activations : device::Role::host_activations, device),
        ahead_(options.num_slots / 2) {}

  Id put(const Tensor& tensor) override;
  Tensor get(Id id) override;
  void drop(Id id) noexcept override;
  int64_t peak_bytes() const override {
    std::lock_guard lock(mutex_);
    return peak_;
  }

 private:
  struct LogBlock {
    DiskPlace place;
    int64_t tensors = 0;  // that lie in it, in part or whole
    int64_t before = -1;  // the block that was filled before it
  };
  struct Kept {
    SpilledForm form;
    int64_t begin = 0;  // in the first block
    std::vector<int64_t> blocks;
  };

  Staging::Key key(int64_t block) const { return {this, block}; }
  void write(Kept& kept, const Tensor& bytes);
  void begin_block();
  void read_ahead(int64_t block);
  void release(const Kept& kept);

  const pid_t owner_ = ::getpid();
  mutable std::mutex mutex_;
  SwapFile file_;
  Staging staging_;
  const int ahead_;
  std::vector<LogBlock> blocks_;
  std::vector<int64_t> free_;
  int64_t current_ = -1;  // the block that is being filled
  int64_t filled_ = 0;    // bytes of it
  std::unordered_map<Id, Kept> tensors_;
  Id last_ = 0;
  int64_t bytes_ = 0, peak_ = 0;
};

Spill::Id FileSpill::put(const Tensor& tensor) {
  const at::NoGradGuard no_grad;
  Kept kept{SpilledForm(tensor)};
  const Tensor bytes = kept.form.bytes_of(tensor);
  std::lock_guard lock(mutex_);
  try {
    write(kept, bytes);
  } catch (...) {
    release(kept);
    throw;
  }
  bytes_ += kept.form.nbytes();
  peak_ = std::max(peak_, bytes_);
  tensors_.emplace(++last_, std::move(kept));
  return last_;
}

void FileSpill::write(Kept& kept, const Tensor& bytes) {
  for (int64_t done = 0; done < bytes.numel();) {
    if (current_ < 0 || filled_ >= kSwapBlockBytes) begin_block();
    if (kept.blocks.empty()) kept.begin = filled_;
    const int64_t count = std::min(kSwapBlockBytes - filled_, bytes.numel() - done);
    LogBlock& block = blocks_[static_cast<size_t>(current_)];
    const OpenBlock open(staging_, key(current_), block.place, /*keep_values=*/filled_ > 0, /*changes=*/true);
    open.part(filled_, count).copy_(bytes.narrow(0, done, count));
    kept.blocks.push_back(current_);
    ++block.tensors;
    done += count;
    filled_ += (count + kAlignment - 1) / kAlignment * kAlignment;
  }
}

void FileSpill::begin_block() {
  if (free_.empty()) {
    const DiskRegion region = file_.reserve(kBlocksAtOnce * kSwapBlockBytes);
    for (int64_t i = kBlocksAtOnce; i-- > 0;) {
      free_.push_back(static_cast<int64_t>(blocks_.size()));
      blocks_.push_back({region.block(i)});
    }
  }
  const int64_t next = free_.back();
  free_.pop_back();
  if (current_ >= 0 && blocks_[static_cast<size_t>(current_)].tensors == 0) free_.push_back(current_);
  blocks_[static_cast<size_t>(next)].before = current_;
  current_ = next;
  filled_ = 0;
}

/// Backward goes on to what was put before. A block that has been taken for something else since is read for nothing.
void FileSpill::read_ahead(int64_t block) {
  for (int i = 0; i <= ahead_ && block >= 0; ++i) {
    const LogBlock& wanted = blocks_[static_cast<size_t>(block)];
    if (wanted.tensors > 0) staging_.prefetch(key(block), wanted.place, kWhat);
    block = wanted.before;
  }
}

Tensor FileSpill::get(Id id) {
  const at::NoGradGuard no_grad;
  std::lock_guard lock(mutex_);
  const Kept& kept = tensors_.at(id);
  Tensor tensor = kept.form.make();
  const Tensor bytes = kept.form.bytes_of(tensor);
  int64_t end = bytes.numel();
  for (size_t i = kept.blocks.size(); i-- > 0;) {
    const int64_t before = i == 0 ? 0 : static_cast<int64_t>(i) * kSwapBlockBytes - kept.begin;  // bytes in others
    const int64_t block = kept.blocks[i];
    read_ahead(block);
    const OpenBlock open(staging_, key(block), blocks_[static_cast<size_t>(block)].place, /*keep_values=*/true,
                         /*changes=*/false);
    bytes.narrow(0, before, end - before).copy_(open.part(i == 0 ? kept.begin : 0, end - before));
    end = before;
  }
  return tensor;
}

void FileSpill::release(const Kept& kept) {
  for (const int64_t block : kept.blocks) {
    if (--blocks_[static_cast<size_t>(block)].tensors > 0) continue;
    if (block == current_) {
      filled_ = 0;
    } else {
      free_.push_back(block);
    }
  }
}

void FileSpill::drop(Id id) noexcept {
  if (::getpid() != owner_) return;
  std::lock_guard lock(mutex_);
  const auto found = tensors_.find(id);
  if (found == tensors_.end()) return;
  bytes_ -= found->second.form.nbytes();
  release(found->second);
  tensors_.erase(found);
}

}  // namespace

std::unique_ptr<Spill> spill_to_files(const OffloadOptions& options, const std::shared_ptr<device::Ledger>& ledger,
                                      at::Device device) {
  return std::make_unique<FileSpill>(options, ledger, device);
}

}  // namespace deeptide::tiers
