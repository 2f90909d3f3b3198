// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lends blocks out of staging memory.
#include "tiers/file_store.h"

#include <algorithm>

#include "base/invariant.h"
#include "base/libraries/format.h"

namespace deeptide::tiers {

using at::Tensor;

namespace {

class FileStore : public Store {
 public:
  FileStore(Tensor resident, int64_t numel, std::shared_ptr<SwapFile> file, std::shared_ptr<Staging> staging,
            std::string name)
      : resident_(std::move(resident)),
        first_(resident_.numel()),
        numel_(numel),
        block_numel_(swap_block_numel(resident_.scalar_type())),
        file_(std::move(file)),
        staging_(std::move(staging)),
        name_(std::move(name)),
        region_(file_->reserve((numel - first_) * static_cast<int64_t>(resident_.element_size()))) {}

  ~FileStore() override { staging_->forget(this); }
  FileStore(const FileStore&) = delete;

  Tier tier() const override { return Tier::nvme; }
  int64_t resident_numel(int64_t) const override { return first_; }

  Tensor open(Block block, Access access) override {
    if (is_resident(block)) return resident_.narrow(0, block.count == 0 ? 0 : block.begin, block.count);
    const int64_t index = index_of(block);
    const int64_t begin = first_ + index * block_numel_;
    // A lease of a part must not lose the rest.
    const bool whole = block.begin == begin && block.count == std::min(block_numel_, numel_ - begin);
    const bool keeps = access != Access::write || !whole;
    const Tensor bytes = staging_->open({this, index}, region_.block(index), keeps, name_);
    return bytes.view(resident_.scalar_type()).narrow(0, block.begin - begin, block.count);
  }

  void close(Block block, Access access) noexcept override {
    if (!is_resident(block)) staging_->close({this, index_of(block)}, access != Access::read);
  }

  void prefetch(Block block) override {
    if (!is_resident(block)) staging_->prefetch({this, index_of(block)}, region_.block(index_of(block)), name_);
  }

  void write_behind() override { staging_->write_behind(this); }

  void read_beside(Block block, const Tensor& target) override {
    if (is_resident(block)) {
      target.copy_(resident_.narrow(0, block.count == 0 ? 0 : block.begin, block.count));
      return;
    }
    const int64_t index = index_of(block);
    const int64_t begin = first_ + index * block_numel_;
    const Tensor bytes = staging_->copy_of({this, index}, region_.block(index), name_);
    target.copy_(bytes.view(resident_.scalar_type()).narrow(0, block.begin - begin, block.count));
  }

 private:
  bool is_resident(Block block) const { return block.begin < first_ || block.count == 0; }
  int64_t index_of(Block block) const { return (block.begin - first_) / block_numel_; }

  Tensor resident_;
  int64_t first_;  // element in a file
  int64_t numel_;
  int64_t block_numel_;
  std::shared_ptr<SwapFile> file_;
  std::shared_ptr<Staging> staging_;
  std::string name_;
  DiskRegion region_;
};

}  // namespace

Buffer file_buffer(Tensor resident, int64_t numel, std::shared_ptr<SwapFile> file, std::shared_ptr<Staging> staging,
                   std::string name) {
  const at::ScalarType dtype = resident.scalar_type();
  const int64_t block_numel = swap_block_numel(dtype);
  DEEPTIDE_INVARIANT(resident.numel() % block_numel == 0 && resident.numel() <= numel,
                     "the resident part is whole blocks");
  auto store =
      std::make_shared<FileStore>(std::move(resident), numel, std::move(file), std::move(staging), std::move(name));
  return {std::move(store), numel, dtype, block_numel};
}

std::string split_text(int64_t bytes_in_memory, int64_t bytes_in_files, const SwapFile& file, const Staging& staging) {
  std::string folders;
  for (const std::string& folder : file.folders()) folders += (folders.empty() ? "" : ", ") + folder;
  const int64_t all = bytes_in_memory + bytes_in_files;
  const double share = all == 0 ? 0.0 : 100.0 * static_cast<double>(bytes_in_files) / static_cast<double>(all);
  constexpr double kMiB = 1 << 20;
  return format_text(
      "{:.1f} % in memory ({:.1f} MiB), {:.1f} % in files of {} ({:.1f} MiB, {}, {}), through {:.1f} MiB",
      100.0 - share, static_cast<double>(bytes_in_memory) / kMiB, share, folders,
      static_cast<double>(bytes_in_files) / kMiB, staging.queue_name(),
      file.is_direct() ? "O_DIRECT" : "through the page cache", static_cast<double>(staging.nbytes()) / kMiB);
}

}  // namespace deeptide::tiers
