// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which share of optimizer states files can take without making a step longer: "ratio": "auto".
#pragma once

#include "comm/group.h"
#include "device/memory.h"
#include "optim/rule.h"
#include "tiers/offload.h"

namespace deeptide::engine {

/// Memory that measuring takes, beside what a rank steps. Units: bytes.
int64_t bytes_to_measure();

/// Of one block of states.
struct BlockTimes {
  double step_seconds = 0.0;      // in memory
  double transfer_seconds = 0.0;  // read and written, while nothing else is
};

/// The share at which the transfers of what lies in files take as long as the step of all states: whole percents,
/// rounded down.
double balanced_ratio(const BlockTimes& times);

/// Times both on this rank, in the folders of `options`.
/// Errors: RuntimeError naming the folder.
BlockTimes time_blocks(const tiers::OffloadOptions& options, const optim::Rule& rule, const Hyperparameters& hyper,
                       const std::shared_ptr<device::Ledger>& ledger);

/// Collective. All ranks time at once, since those of a host share its memory and drives, and take the least ratio.
double measure_ratio(const tiers::OffloadOptions& options, const optim::Rule& rule, const Hyperparameters& hyper,
                     const std::shared_ptr<device::Ledger>& ledger, comm::Group& control);

}  // namespace deeptide::engine
