// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The reduce-scatter of several hosts with several ranks each: neighbours on one host are summed there, through shared
// memory, and only their sums cross the network.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/group.h"
#include "host/exchange.h"

namespace deeptide::gradients {

/// How many neighbours' contributions of `dtype` travel as one, in fp32: the largest power of two that divides a host's
/// ranks, so that sums by pairs keep their bits. 1 where that saves no bytes.
int64_t summed_together(int64_t ranks_per_host, at::ScalarType dtype);

/// Rows arrive in the order of ranks: each is the sum of `together` of them. Used by one thread at a time; `start` may
/// run beside the others.
class HierarchicalSums {
 public:
  /// What is not finite, seen where it was summed.
  struct BadElement {
    int unit;
    int64_t element;  // of the unit
    int rank;         // whose contribution is bad, by index in the team; -1: each is finite, their sum is not
  };
  struct Hooks {
    std::function<void(at::Tensor bucket, uint32_t offer)> lend;  // this rank needs the bucket no longer
    std::function<void(const BadElement&)> note;
  };

  /// `group`: over hosts of equally many ranks, numbered host by host; its transport has a rail. `exchange`: of this
  /// host.
  HierarchicalSums(comm::Group& group, host::Exchange& exchange, int64_t together, Hooks hooks);

  /// Elements, of fp32, that a unit's reduction needs: what leaves, then what arrives.
  static int64_t memory_numel(int64_t unit_numel, int64_t together) { return 2 * unit_numel / together; }
  int64_t memory_numel(int64_t unit_numel) const { return memory_numel(unit_numel, together_); }

  /// Offers a unit's bucket (N,) to the host's ranks. `memory`: (memory_numel(N),). All ranks start the same units in
  /// the same order.
  comm::Pending start(int unit, at::Tensor bucket, at::Tensor memory);
  /// Sums and sends, in their order, what all ranks of the host have offered; never waits.
  void go_on();
  /// What has arrived: this rank's shard of the unit, a row (N / ranks,) for each sum, in the order of ranks.
  std::vector<at::Tensor> rows(const at::Tensor& memory) const;

 private:
  class Sum;

  bool wait_for(Sum& sum, std::chrono::milliseconds limit);
  void send(Sum& sum);
  Sum* front();
  int64_t num_rows() const { return group_.size() / together_; }

  comm::Group& group_;
  host::Exchange& exchange_;
  int64_t per_host_;  // ranks
  int64_t own_host_;
  int64_t own_index_;
  int64_t together_;
  Hooks hooks_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Sum>> offered_;  // but not sent yet
};

}  // namespace deeptide::gradients
