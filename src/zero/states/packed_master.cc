// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lends unpacked copies.
#include "zero/states/packed_master.h"

#include <ATen/ops/empty.h>

#include <map>
#include <mutex>
#include <vector>

namespace deeptide::zero {

using at::Tensor;
using tiers::Access;
using tiers::Block;
using tiers::Buffer;
using tiers::Lease;
using tiers::Store;
using tiers::Tier;

namespace {

constexpr int64_t kUnpackedNumel = 1 << 18;  // of a lease: 1 MiB

/// Halves are leased for as long as the whole is: packing at the end of a lease cannot fail then.
class PackedStore : public Store {
 public:
  PackedStore(Buffer parameters, PackedMaster master)
      : parameters_(std::move(parameters)), master_(std::move(master)) {}

  Tier tier() const override { return std::max(parameters_.tier(), master_.low.tier()); }
  int64_t resident_numel(int64_t numel) const override { return std::min(numel, master_.low.resident_bytes() / 2); }

  Tensor open(Block block, Access access) override {
    OpenBlock opened;
    const Buffer* const both[] = {&parameters_, &master_.low};
    for_each_block(std::span<const Buffer* const>(both), block, [&](Block part) {
      Part& halves =
          opened.parts.emplace_back(Part{part, parameters_.lease(part, access), master_.low.lease(part, access)});
      if (!opened.values.defined()) {
        opened.values = at::empty({block.count}, halves.high.tensor().options().dtype(at::kFloat));
      }
      if (access == Access::write) return;
      numerics::unpack(tensors_of(halves), values_of(opened, block, part));
    });
    const Tensor lent = opened.values;
    const std::lock_guard lock(mutex_);
    open_[block.begin] = std::move(opened);
    return lent;
  }

  void close(Block block, Access access) noexcept override {
    OpenBlock closed;
    {
      const std::lock_guard lock(mutex_);
      closed = std::move(open_.extract(block.begin).mapped());
    }
    if (access == Access::read) return;
    for (const Part& part : closed.parts) {
      numerics::pack(values_of(closed, block, part.block), tensors_of(part));
    }
  }

  void read_beside(Block block, const Tensor& target) override {
    const Tensor high = at::empty({block.count}, target.options().dtype(parameters_.dtype()));
    const Tensor low = at::empty({block.count}, target.options().dtype(master_.low.dtype()));
    parameters_.copy_beside(block, high);
    master_.low.copy_beside(block, low);
    numerics::unpack({high, low, master_.halfway.get(), block.begin}, target);
  }

  void prefetch(Block block) override {
    parameters_.prefetch(block);
    master_.low.prefetch(block);
  }

  void write_behind() override {
    parameters_.write_behind();
    master_.low.write_behind();
  }

 private:
  struct Part {
    Block block;
    Lease high, low;
  };
  struct OpenBlock {
    Tensor values;
    std::vector<Part> parts;
  };

  numerics::PackedTensors tensors_of(const Part& part) const {
    return {part.high.tensor(), part.low.tensor(), master_.halfway.get(), part.block.begin};
  }

  static Tensor values_of(const OpenBlock& opened, Block block, Block part) {
    return opened.values.narrow(0, part.begin - block.begin, part.count);
  }

  Buffer parameters_;
  PackedMaster master_;
  std::mutex mutex_;
  std::map<int64_t, OpenBlock> open_;  // by the first element
};

}  // namespace

Buffer packed_buffer(Buffer parameters, PackedMaster master) {
  const int64_t numel = parameters.numel();
  return {std::make_shared<PackedStore>(std::move(parameters), std::move(master)), numel, at::kFloat, kUnpackedNumel};
}

}  // namespace deeptide::zero
