// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A store whose blocks lie elsewhere until a lease brings them in: what files do, without files.
#pragma once

#include <ATen/ops/empty.h>

#include <map>
#include <vector>

#include "tiers/buffer.h"

namespace deeptide::tiers {

/// Lends copies: what a reading lease changes is lost, what a writing one does not write is garbage.
class CopyingStore : public Store {
 public:
  explicit CopyingStore(at::Tensor flat) : flat_(std::move(flat)) {}
  Tier tier() const override { return Tier::nvme; }
  int64_t resident_numel(int64_t) const override { return 0; }
  at::Tensor open(Block block, Access access) override {
    at::Tensor lent = at::empty({block.count}, flat_.options());
    if (access == Access::write) {
      lent.fill_(-12345);
    } else {
      lent.copy_(flat_.narrow(0, block.begin, block.count));
    }
    ++open_leases;
    return lent_[block.begin] = lent;
  }
  void close(Block block, Access access) noexcept override {
    if (access != Access::read) flat_.narrow(0, block.begin, block.count).copy_(lent_[block.begin]);
    lent_.erase(block.begin);
    --open_leases;
  }
  void prefetch(Block block) override { asked.push_back(block.begin); }

  int open_leases = 0;
  std::vector<int64_t> asked;

 private:
  at::Tensor flat_;
  std::map<int64_t, at::Tensor> lent_;  // by its first element
};

}  // namespace deeptide::tiers
