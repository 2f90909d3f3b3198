// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lends blocks out of staging memory.
#include "tiers/file_store.h"

#include <c10/util/Exception.h>

#include "base/invariant.h"

namespace deeptide::tiers {

using at::Tensor;

namespace {

class FileStore : public Store {
 public:
  FileStore(Tensor resident, int64_t numel, std::shared_ptr<SwapFile> file, std::shared_ptr<Staging> staging,
            std::string name)
      : resident_(std::move(resident)),
        first_(resident_.numel()),
        file_(std::move(file)),
        staging_(std::move(staging)),
        name_(std::move(name)),
        region_(file_->reserve((numel - first_) * static_cast<int64_t>(sizeof(float)))) {}

  ~FileStore() override { staging_->forget(this); }
  FileStore(const FileStore&) = delete;

  Tier tier() const override { return Tier::nvme; }
  int64_t resident_numel(int64_t) const override { return first_; }

  Tensor open(Block block, Access access) override {
    if (is_resident(block)) return resident_.narrow(0, block.count == 0 ? 0 : block.begin, block.count);
    const int64_t index = index_of(block);
    // A lease of a part must not lose the rest.
    const bool whole = block.begin == first_ + index * kSwapBlockNumel && block.count == numel_of(index);
    const bool keeps = access != Access::write || !whole;
    const Tensor bytes = staging_->open({this, index}, region_.block(index), keeps, name_);
    const int64_t begin = block.begin - first_ - index * kSwapBlockNumel;
    return bytes.view(at::kFloat).narrow(0, begin, block.count);
  }

  void close(Block block, Access access) noexcept override {
    if (!is_resident(block)) staging_->close({this, index_of(block)}, access != Access::read);
  }

  void prefetch(Block block) override {
    if (!is_resident(block)) staging_->prefetch({this, index_of(block)}, region_.block(index_of(block)));
  }

 private:
  bool is_resident(Block block) const { return block.begin < first_ || block.count == 0; }
  int64_t index_of(Block block) const { return (block.begin - first_) / kSwapBlockNumel; }
  /// Elements that fit into the block on disk; the last one's padding is written along with it.
  int64_t numel_of(int64_t index) const { return region_.block(index).bytes / static_cast<int64_t>(sizeof(float)); }

  Tensor resident_;
  int64_t first_;  // element in a file
  std::shared_ptr<SwapFile> file_;
  std::shared_ptr<Staging> staging_;
  std::string name_;
  DiskRegion region_;
};

}  // namespace

Buffer file_buffer(Tensor resident, int64_t numel, std::shared_ptr<SwapFile> file, std::shared_ptr<Staging> staging,
                   std::string name) {
  DEEPTIDE_INVARIANT(resident.numel() % kSwapBlockNumel == 0 && resident.numel() <= numel,
                     "the resident part is whole blocks");
  auto store =
      std::make_shared<FileStore>(std::move(resident), numel, std::move(file), std::move(staging), std::move(name));
  return {std::move(store), numel, at::kFloat, kSwapBlockNumel};
}

}  // namespace deeptide::tiers
