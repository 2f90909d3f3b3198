// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Each lease is one of the buffer in which its elements lie.
#include "tiers/joined.h"

#include <map>
#include <mutex>

#include "base/invariant.h"

namespace deeptide::tiers {

namespace {

class JoinedStore : public Store {
 public:
  JoinedStore(Buffer first, Buffer second) : first_(std::move(first)), second_(std::move(second)) {}

  Tier tier() const override { return std::max(first_.tier(), second_.tier()); }
  int64_t resident_numel(int64_t) const override {
    const auto item = static_cast<int64_t>(c10::elementSize(first_.dtype()));
    return (first_.resident_bytes() + second_.resident_bytes()) / item;
  }

  at::Tensor open(Block block, Access access) override {
    const auto [buffer, own] = place_of(block);
    Lease lease = buffer->lease(own, access);
    at::Tensor lent = lease.tensor();
    const std::lock_guard lock(mutex_);
    open_.emplace(block.begin, std::move(lease));
    return lent;
  }

  void close(Block block, Access) noexcept override {
    Lease ended;
    const std::lock_guard lock(mutex_);
    if (const auto found = open_.find(block.begin); found != open_.end())
      ended = std::move(open_.extract(found).mapped());
  }

  void prefetch(Block block) override {
    const auto [buffer, own] = place_of(block);
    buffer->prefetch(own);
  }

  void write_behind() override {
    first_.write_behind();
    second_.write_behind();
  }

  void read_beside(Block block, const at::Tensor& target) override {
    const auto [buffer, own] = place_of(block);
    buffer->copy_beside(own, target);
  }

 private:
  std::pair<const Buffer*, Block> place_of(Block block) const {
    if (block.begin < first_.numel()) return {&first_, block};
    return {&second_, {block.begin - first_.numel(), block.count}};
  }

  Buffer first_, second_;
  std::mutex mutex_;
  std::multimap<int64_t, Lease> open_;  // by the first element
};

}  // namespace

Buffer joined(Buffer first, Buffer second, int64_t block_numel) {
  DEEPTIDE_INVARIANT(first.dtype() == second.dtype() && first.numel() % block_numel == 0,
                     "what is joined has one type, and the first part is whole blocks");
  const int64_t numel = first.numel() + second.numel();
  const at::ScalarType dtype = first.dtype();
  return {std::make_shared<JoinedStore>(std::move(first), std::move(second)), numel, dtype, block_numel};
}

}  // namespace deeptide::tiers
