// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Steps blocks where they may lie, and passes others through files, or between device and host.
#include "engine/bind/offload_ratio.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>

#include "device/lane.h"
#include "device/memory/page_locked.h"
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

/// The states of a block of elements, the master included.
int num_states(const optim::Rule& rule, const Hyperparameters& hyper) {
  int count = 1;
  for (size_t role = 0; role < rule.roles().size(); ++role) count += rule.keeps(role, hyper) ? 1 : 0;
  return count;
}

/// The least of some trials; a first one takes the pages.
double least_seconds_of(const std::function<void(int)>& run) {
  double least = 0.0;
  for (int trial = 0; trial <= kTrials; ++trial) {
    const double seconds = seconds_of([&] { run(trial); });
    if (trial > 0) least = trial == 1 ? seconds : std::min(least, seconds);
  }
  return least;
}

/// Seconds for all the states of a block of elements.
double time_step(const optim::Rule& rule, const Hyperparameters& hyper, at::Device device) {
  const int64_t side = 1 << 10;  // a block of fp32 as a matrix, for rules that take it so
  const int64_t numel = side * side;
  const auto options = at::TensorOptions().device(device);
  optim::Segment segment{.master = at::zeros({numel}, options),
                         .states = std::vector<Tensor>(rule.roles().size()),
                         .gradient = at::full({numel}, 1e-3, options),
                         .param = at::empty({numel}, options.dtype(at::kBFloat16)),
                         .rows = side};
  for (size_t role = 0; role < rule.roles().size(); ++role) {
    if (rule.keeps(role, hyper)) segment.states[role] = at::zeros({numel}, options);
  }
  const device::Lane lane = device::Lane::current(device);
  lane.mark().wait();
  return least_seconds_of([&](int trial) {
    rule.step(segment, hyper, {.step = trial + 1});
    lane.mark().wait();
  });
}

struct CopyTimes {
  double out_seconds = 0.0, in_seconds = 0.0;
};

/// A block's gradients to the host, and as many bytes back.
CopyTimes time_copies(at::Device device) {
  const int64_t numel = tiers::swap_block_numel(at::kFloat);
  const Tensor there = at::zeros({numel}, at::TensorOptions().device(device));
  const Tensor here = device::allocate_page_locked(numel * there.element_size(), device).view(at::kFloat).zero_();
  const device::Lane lane = device::Lane::current(device);
  const auto time_copy = [&](const Tensor& to, const Tensor& from) {
    lane.mark().wait();
    return least_seconds_of([&](int) {
      to.copy_(from, /*non_blocking=*/true);
      lane.mark().wait();
    });
  };
  return {time_copy(here, there), time_copy(there, here)};
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
double time_transfers(const RatioTrial& trial) {
  tiers::OffloadOptions options = trial.files.value();
  options.num_slots = kSlots;
  tiers::Offload files(options, trial.ledger, trial.role, "blocks to measure the drive");
  const tiers::Buffer buffer = files.place(kBlocks * tiers::swap_block_numel(at::kFloat), 0, at::kFloat);
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

double balanced_host_share(const SideTimes& times) {
  const double both = times.device_seconds + times.host_seconds;
  return both > 0.0 ? std::floor(100.0 * times.device_seconds / both) / 100.0 : 1.0;
}

BlockTimes time_blocks(const RatioTrial& trial) {
  const at::NoGradGuard no_grad;
  const double step = time_step(trial.rule, trial.hyper, at::kCPU);
  return {step / num_states(trial.rule, trial.hyper), time_transfers(trial)};
}

SideTimes time_sides(const RatioTrial& trial, at::Device device) {
  const at::NoGradGuard no_grad;
  const CopyTimes copies = time_copies(device);
  SideTimes times{.device_seconds = time_step(trial.rule, trial.hyper, device),
                  .host_seconds = std::max(time_step(trial.rule, trial.hyper, at::kCPU), copies.out_seconds)};
  if (trial.parameters_off_device) {
    times.device_seconds = std::max(times.device_seconds, copies.out_seconds);
  } else {
    times.host_seconds = std::max(times.host_seconds, copies.in_seconds);
  }
  if (trial.files) {
    times.host_seconds = std::max(times.host_seconds, num_states(trial.rule, trial.hyper) * time_transfers(trial));
  }
  return times;
}

namespace {

/// Collective. The least of what all ranks find at once.
double least_of_all(const std::function<double()>& find, const comm::Site& site, comm::Group& control) {
  control.barrier(site);
  const Tensor own = at::full({1}, find(), at::kDouble);
  const Tensor all = at::empty({control.size()}, at::kDouble);
  auto pending = control.all_gather(all, own);
  control.wait(pending, site);
  return all.min().item<double>();
}

}  // namespace

double measure_ratio(const RatioTrial& trial, comm::Group& control) {
  return least_of_all([&] { return balanced_ratio(time_blocks(trial)); },
                      {"start", "measuring which share of optimizer states files can take"}, control);
}

double measure_host_share(const RatioTrial& trial, at::Device device, comm::Group& control) {
  return least_of_all([&] { return balanced_host_share(time_sides(trial, device)); },
                      {"start", "measuring which share of optimizer states the host can step"}, control);
}

}  // namespace deeptide::engine
