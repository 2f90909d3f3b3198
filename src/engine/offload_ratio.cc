// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Steps blocks in memory, and passes others through files.
#include "engine/offload_ratio.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>

#include "tiers/file_store.h"

namespace deeptide::engine {

using at::Tensor;
using tiers::Access;

namespace {

constexpr int kSlots = 6;
constexpr int kBlocks = 2 * kSlots;  // more than memory holds, so that each is read and written
constexpr int kTrials = 3;

double seconds_of(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Of all the states of a block of elements, per state. The first trial takes the pages.
double time_step(const optim::Rule& rule, const Hyperparameters& hyper) {
  const int64_t side = 1 << 10;  // a block of fp32 as a matrix, for rules that take it so
  const int64_t numel = side * side;
  optim::Segment segment{.master = at::zeros({numel}),
                         .states = std::vector<Tensor>(rule.roles().size()),
                         .gradient = at::full({numel}, 1e-3),
                         .param = at::empty({numel}, at::kBFloat16),
                         .rows = side};
  int num_states = 1;
  for (size_t role = 0; role < rule.roles().size(); ++role) {
    if (!rule.keeps(role, hyper)) continue;
    segment.states[role] = at::zeros({numel});
    ++num_states;
  }
  double least = 0.0;
  for (int trial = 0; trial <= kTrials; ++trial) {
    const double seconds = seconds_of([&] { rule.step(segment, hyper, {.step = trial + 1}); });
    if (trial > 0) least = trial == 1 ? seconds : std::min(least, seconds);
  }
  return least / num_states;
}

/// Reads and writes each block of the buffer, the next ones read ahead.
void pass_through(const tiers::Buffer& buffer, Access access) {
  for (int64_t index = 0; index < buffer.num_blocks(); ++index) {
    const auto lease = buffer.lease(buffer.block(index), access);
    if (access == Access::write) lease.tensor().fill_(1.0);
    for (int64_t next = index + 1; access != Access::write && next < std::min(buffer.num_blocks(), index + 3); ++next) {
      buffer.prefetch(buffer.block(next));
    }
  }
  buffer.write_behind();
}

/// A file that was only reserved would be read without its drive: the first pass fills it.
double time_transfers(tiers::OffloadOptions options, const std::shared_ptr<device::Ledger>& ledger) {
  options.ratio = 1.0;
  options.num_slots = kSlots;
  tiers::Offload trial(options, ledger, device::Role::optimizer, "blocks to measure the drive");
  const tiers::Buffer buffer = trial.place(kBlocks * tiers::swap_block_numel(at::kFloat), at::kFloat);
  pass_through(buffer, Access::write);
  pass_through(buffer, Access::update);
  return seconds_of([&] { pass_through(buffer, Access::update); }) / kBlocks;
}

}  // namespace

int64_t bytes_to_measure() { return kSlots * tiers::kSwapBlockBytes; }

double balanced_ratio(const BlockTimes& times) {
  if (times.transfer_seconds <= times.step_seconds) return 1.0;
  return std::floor(100.0 * times.step_seconds / times.transfer_seconds) / 100.0;
}

BlockTimes time_blocks(const tiers::OffloadOptions& options, const optim::Rule& rule, const Hyperparameters& hyper,
                       const std::shared_ptr<device::Ledger>& ledger) {
  const at::NoGradGuard no_grad;
  return {time_step(rule, hyper), time_transfers(options, ledger)};
}

double measure_ratio(const tiers::OffloadOptions& options, const optim::Rule& rule, const Hyperparameters& hyper,
                     const std::shared_ptr<device::Ledger>& ledger, comm::Group& control) {
  const comm::Site site{"start", "measuring which share of optimizer states files can take"};
  control.barrier(site);
  const Tensor own = at::full({1}, balanced_ratio(time_blocks(options, rule, hyper, ledger)), at::kDouble);
  const Tensor all = at::empty({control.size()}, at::kDouble);
  auto pending = control.all_gather(all, own);
  control.wait(pending, site);
  return all.min().item<double>();
}

}  // namespace deeptide::engine
