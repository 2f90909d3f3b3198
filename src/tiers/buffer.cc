// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Implements leases, and the store of resident memory.
#include "tiers/buffer.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "base/invariant.h"

namespace deeptide::tiers {

using at::Tensor;

namespace {

class ResidentStore : public Store {
 public:
  explicit ResidentStore(Tensor flat) : flat_(std::move(flat)) {}
  Tier tier() const override { return flat_.is_cpu() ? Tier::cpu : Tier::device; }
  Tensor open(Block block, Access) override { return flat_.narrow(0, block.begin, block.count); }
  void close(Block, Access) noexcept override {}
  void prefetch(Block) override {}
  Tensor in_place() const override { return flat_; }

 private:
  Tensor flat_;
};

}  // namespace

void Store::read_beside(Block block, const Tensor& target) {
  target.copy_(open(block, Access::read));
  close(block, Access::read);
}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  end();
  store_ = std::move(other.store_);
  block_ = other.block_;
  access_ = other.access_;
  tensor_ = std::move(other.tensor_);
  return *this;
}

void Lease::end() noexcept {
  tensor_.reset();
  if (store_) store_->close(block_, access_);
  store_.reset();
}

Buffer Buffer::resident(Tensor flat) {
  DEEPTIDE_INVARIANT(flat.dim() == 1 && flat.is_contiguous(), "a buffer is flat and contiguous");
  const int64_t numel = flat.numel();
  const auto dtype = flat.scalar_type();
  return {std::make_shared<ResidentStore>(std::move(flat)), numel, dtype, numel};
}

Buffer::Buffer(std::shared_ptr<Store> store, int64_t numel, at::ScalarType dtype, int64_t block_numel)
    : store_(std::move(store)), numel_(numel), dtype_(dtype), block_numel_(block_numel) {}

Block Buffer::block(int64_t index) const {
  const int64_t begin = index * block_numel_;
  return {begin, std::min(block_numel_, numel_ - begin)};
}

Lease Buffer::lease(Block range, Access access) const {
  DEEPTIDE_INVARIANT(range.begin >= 0 && range.count >= 0 && range.begin + range.count <= numel_, "elements [",
                     range.begin, ", ", range.begin + range.count, ") of a buffer of ", numel_);
  DEEPTIDE_INVARIANT(range.count == 0 || range.begin / block_numel_ == (range.begin + range.count - 1) / block_numel_,
                     "a lease spans two blocks");
  return {store_, range, access};
}

Tensor Buffer::copy(Block range) const {
  Tensor all;
  for_each_block(*this, range, [&](Block block) {
    const Lease part = lease(block, Access::read);
    if (!all.defined()) all = at::empty({range.count}, part.tensor().options());
    all.narrow(0, block.begin - range.begin, block.count).copy_(part.tensor());
  });
  return all.defined() ? all : at::empty({0}, dtype_);
}

void Buffer::copy_to(const Tensor& target) const {
  for_each_block(*this, {0, numel_}, [&](Block block) {
    const Tensor part = target.narrow(0, block.begin, block.count);
    const bool starts = store_->start_read(block, part);
    const Lease source = starts ? Lease() : lease(block, Access::read);
    if (const int64_t next = block.begin + block.count; next < numel_) prefetch({next, 1});
    if (!starts) part.copy_(source.tensor());
  });
}

void Buffer::copy_beside(Block range, const Tensor& target) const {
  for_each_block(*this, range, [&](Block block) {
    store_->read_beside(block, target.narrow(0, block.begin - range.begin, block.count));
  });
}

void Buffer::copy_from(const Tensor& source, int64_t begin) const {
  for_each_block(*this, {begin, source.numel()}, [&](Block block) {
    const Tensor part = source.narrow(0, block.begin - begin, block.count);
    if (!store_->start_write(block, part)) lease(block, Access::write).tensor().copy_(part);
  });
}

}  // namespace deeptide::tiers
