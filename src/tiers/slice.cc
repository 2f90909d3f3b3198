// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Each lease is one of the whole buffer.
#include "tiers/slice.h"

#include <algorithm>
#include <numeric>

#include "base/invariant.h"

namespace deeptide::tiers {

namespace {

class SliceStore : public Store {
 public:
  SliceStore(std::shared_ptr<Store> whole, int64_t begin) : whole_(std::move(whole)), begin_(begin) {}

  Tier tier() const override { return whole_->tier(); }
  int64_t resident_numel(int64_t numel) const override {
    return std::clamp<int64_t>(whole_->resident_numel(begin_ + numel) - begin_, 0, numel);
  }
  at::Tensor open(Block block, Access access) override { return whole_->open(moved(block), access); }
  void close(Block block, Access access) noexcept override { whole_->close(moved(block), access); }
  void prefetch(Block block) override { whole_->prefetch(moved(block)); }
  void write_behind() override { whole_->write_behind(); }
  bool start_read(Block block, const at::Tensor& target) override { return whole_->start_read(moved(block), target); }
  bool start_write(Block block, const at::Tensor& source) override { return whole_->start_write(moved(block), source); }
  void read_beside(Block block, const at::Tensor& target) override { whole_->read_beside(moved(block), target); }

 private:
  Block moved(Block block) const { return {begin_ + block.begin, block.count}; }

  std::shared_ptr<Store> whole_;
  int64_t begin_;
};

}  // namespace

Buffer slice(const Buffer& whole, Block range) {
  DEEPTIDE_INVARIANT(range.begin >= 0 && range.count >= 0 && range.end() <= whole.numel(), "elements [", range.begin,
                     ", ", range.end(), ") of a buffer of ", whole.numel());
  if (range.count == whole.numel()) return whole;
  if (const at::Tensor flat = whole.in_place(); flat.defined()) {
    return Buffer::resident(flat.narrow(0, range.begin, range.count));
  }
  const bool is_one_block = whole.num_blocks() <= 1;
  const int64_t block_numel = is_one_block ? range.count : std::gcd(range.begin, whole.block_numel());
  return {std::make_shared<SliceStore>(whole.store(), range.begin), range.count, whole.dtype(), block_numel};
}

}  // namespace deeptide::tiers
