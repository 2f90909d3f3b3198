// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which share of optimizer states files or an accelerator's host can take: "ratio": "auto".
#pragma once

#include <memory>
#include <optional>

#include "comm/group.h"
#include "device/memory/memory.h"
#include "optim/rules/rule.h"
#include "tiers/offload.h"

namespace deeptide::engine {

/// Memory that measuring takes, beside what a rank steps. Units: bytes.
int64_t bytes_to_measure();

/// Times for one block of states.
struct BlockTimes {
  double step_seconds = 0.0;      // in memory
  double transfer_seconds = 0.0;  // read and written, while nothing else is
};

/// The share at which the transfers of what lies in files take as long as the step of all states: whole percents,
/// rounded down.
double balanced_ratio(const BlockTimes& times);

/// Times for one block of elements of a device.
struct SideTimes {
  double device_seconds = 0.0;  // stepped on the device; if its parameters lie off it, the longer of this and copied
  double host_seconds = 0.0;    // the longest of: stepped by the host, copied there, copied back, its states in files
};

/// The share of the host at which both sides step equally long: whole percents, rounded down.
double balanced_host_share(const SideTimes& times);

/// The work that is timed, and its place.
struct RatioTrial {
  const optim::Rule& rule;
  const Hyperparameters& hyper;
  std::shared_ptr<device::Ledger> ledger;
  device::Role role = device::Role::optimizer;      // of blocks from files
  std::optional<tiers::OffloadOptions> files = {};  // absent: the host's memory has the states
  bool parameters_off_device = false;               // the host's are not copied back, but the device's are copied out
};

/// Times both on this rank, in the folders of `trial.files`.
/// Errors: RuntimeError naming the folder.
BlockTimes time_blocks(const RatioTrial& trial);
/// Times both sides on this rank. Errors: as above.
SideTimes time_sides(const RatioTrial& trial, at::Device device);

/// Collective. All ranks time at once, since those of a host share its memory and drives, and take the least ratio.
double measure_ratio(const RatioTrial& trial, comm::Group& control);
/// Collective. The same for the host's share of a device's states.
double measure_host_share(const RatioTrial& trial, at::Device device, comm::Group& control);

}  // namespace deeptide::engine
