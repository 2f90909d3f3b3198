// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A few units and a reducer over them, as one rank of a test has them.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gradients/reducer.h"
#include "ranks.h"
#include "world/failure_board.h"

namespace deeptide::gradients {

inline constexpr int64_t kAligned = 16;  // fp32 elements in 64 bytes

/// `first`: the index of its first parameter in the model.
inline sharding::UnitLayout layout_of(const std::string& name, const std::vector<int64_t>& sizes, int world,
                                      int first = 0) {
  sharding::UnitLayout layout;
  layout.name = name;
  int64_t end = 0;
  for (int64_t numel : sizes) {
    layout.slots.push_back({first + static_cast<int>(layout.slots.size()), end, numel});
    end = (end + numel + kAligned - 1) / kAligned * kAligned;
  }
  layout.shard = (end / kAligned + world - 1) / world * kAligned;
  layout.numel = layout.shard * world;
  return layout;
}

inline const std::vector<std::vector<int64_t>> kSizes = {{5, 40}, {1}, {17, 3, 100}, {64}};

inline sharding::UnitPlacement kept_whole(const World& world) {
  return {sharding::UnitMemory::whole, comm::Team::whole(world), comm::Team::whole(world)};
}

/// Every rank can compute every rank's gradient.
inline at::Tensor gradient_of(int rank, int u, int p, int64_t numel, int pass = 0) {
  std::mt19937 random(((pass * 10 + rank) * 10 + u) * 10 + p + 1);
  std::normal_distribution<float> normal;
  const at::Tensor gradient = at::empty({numel});
  for (int64_t i = 0; i < numel; ++i) gradient.mutable_data_ptr<float>()[i] = normal(random);
  return gradient;
}

/// In fp32, neighbours first.
inline at::Tensor sum_by_pairs(std::vector<at::Tensor> rows) {
  for (; rows.size() > 1; rows.resize((rows.size() + 1) / 2)) {
    for (size_t i = 0; i + 1 < rows.size(); i += 2) rows[i / 2] = rows[i].to(at::kFloat) + rows[i + 1].to(at::kFloat);
    if (rows.size() % 2 == 1) rows[rows.size() / 2] = rows.back();
  }
  return rows[0].to(at::kFloat);
}

/// Units kept whole and a reducer over them; parameters are "u<unit>.p<place>".
struct Training {
  explicit Training(const World& world, const ReducerOptions& options = {}, int64_t timeout_ms = 60'000,
                    bool serves = false)
      : board(std::make_shared<world::FailureBoard>(world, "board")),
        control(world, comm::Team::whole(world), "control",
                {.timeout = std::chrono::milliseconds(timeout_ms), .board = board}),
        host(options.together > 1 ? host::Host::find(world, "host", /*enabled=*/true, board) : nullptr),
        group(world, comm::Team::whole(world), "reductions",
              {.timeout = std::chrono::milliseconds(timeout_ms),
               .board = board,
               .host = host,
               .clock = clock,
               .links = links}) {
    std::vector<sharding::Unit*> all;
    int num_parameters = 0;
    for (const auto& sizes : kSizes) {
      const std::string name = "u" + std::to_string(units.size());
      auto layout = layout_of(name, sizes, world.size, num_parameters);
      num_parameters += static_cast<int>(sizes.size());
      std::vector<sharding::Parameter> members;
      for (const auto& slot : layout.slots) {
        sharding::Parameter p;
        p.name = name + ".p" + std::to_string(members.size());
        p.tensors = {at::zeros({slot.numel})};
        p.offset = slot.offset;
        p.numel = slot.numel;
        members.push_back(std::move(p));
      }
      const int index = static_cast<int>(units.size());
      units.push_back(
          std::make_unique<sharding::Unit>(index, std::move(layout), std::move(members), kept_whole(world)));
      all.push_back(units.back().get());
    }
    if (serves) {
      const std::vector<sharding::Unit*> none_sharded(units.size(), nullptr);
      residency = std::make_unique<sharding::Residency>(none_sharded, group, rounds, ledger, at::kCPU,
                                                        sharding::ResidencyLimits());
    }
    reducer = std::make_unique<Reducer>(all, group, exchange(), ledger, at::kCPU, options, residency.get());
  }

  /// Among the ranks of the host, if they sum before anything travels.
  std::unique_ptr<host::Exchange> exchange() const {
    if (!host) return nullptr;
    std::string why_not;
    auto arena = host::Arena::create(*host, 0, host::Arena::heap_of_buckets(1 << 16), why_not);
    EXPECT_NE(arena, nullptr) << why_not;
    return std::make_unique<host::Exchange>(host, std::move(arena));
  }

  /// Closes like the engine's boundary, where the reducer serves: no rank has more. Returns the most rounds that
  /// another rank has announced.
  int64_t close() {
    int64_t most = 0;
    while (!residency->close_for(std::chrono::milliseconds(5), {}, /*ends_pass=*/true)) {
      most = std::max(most, rounds.most_announced());
      reducer->keep_up(rounds.most_announced());
    }
    return most;
  }

  /// Ends a micro-batch like the engine: the ranks agree on the largest number of rounds.
  void finish() {
    const at::Tensor own = at::full({1}, reducer->rounds_wanted(), at::kLong),
                     all = at::empty({group.size()}, at::kLong);
    auto pending = control.all_gather(all, own);
    control.wait(pending, {}, [this] { reducer->go_on(); });
    reducer->finish(all.max().item<int64_t>());
    if (host) control.barrier({});  // as the ranks' verdicts: a rank that ends frees buckets that others may still read
  }

  /// Calls visit(unit, parameter, numel) as backward would reach them: last first.
  template <typename Visit>
  void backwards(Visit visit) {
    for (int u = static_cast<int>(kSizes.size()) - 1; u >= 0; --u) {
      for (int p = static_cast<int>(kSizes[u].size()) - 1; p >= 0; --p) visit(u, p, kSizes[u][p]);
    }
  }

  /// Buffers are those that were reserved; what a late peer adds is counted apart, within its own limit.
  void expect_memory_as_predicted() {
    using device::Role;
    const ReducerForecast predicted = reducer->predicted();
    EXPECT_EQ(ledger->peak(Role::communication), predicted.communication);
    EXPECT_LE(ledger->peak(Role::late_communication), predicted.late_communication);
    EXPECT_LE(ledger->peak(Role::late_gradients), predicted.late_gradients);
  }

  /// This rank's part of a parameter's sum equals that of `expected` (numel,), bit for bit.
  void expect_sum(int u, int p, const at::Tensor& expected) {
    const sharding::Unit& unit = *units[u];
    const sharding::Parameter& parameter = unit.parameters()[p];
    const auto [first, last] = unit.owned_range(parameter);
    if (first == last) return;
    const at::Tensor mine = reducer->gradient(u).sum().narrow(0, first - unit.shard_begin(), last - first);
    EXPECT_TRUE(at::equal(mine, expected.narrow(0, first - parameter.offset, last - first))) << parameter.name;
  }

  std::shared_ptr<world::FailureBoard> board;
  std::shared_ptr<comm::Clock> clock = std::make_shared<comm::Clock>();
  comm::Group control;
  comm::Rounds rounds{control};
  std::shared_ptr<host::Host> host;
  std::shared_ptr<comm::LinkTimes> links = std::make_shared<comm::LinkTimes>(std::vector<int>{});
  comm::Group group;
  std::shared_ptr<device::Ledger> ledger = std::make_shared<device::Ledger>();
  std::vector<std::unique_ptr<sharding::Unit>> units;
  std::unique_ptr<sharding::Residency> residency;  // null: nobody is served
  std::unique_ptr<Reducer> reducer;
};

}  // namespace deeptide::gradients
