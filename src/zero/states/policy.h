// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The stage table: what each ZeRO stage shards and when it reduces. The only place where stages differ.
#pragma once

#include <array>

namespace deeptide::zero {

/// Source: ZeRO, arXiv:1910.02054, sec. 5.
struct StagePolicy {
  bool shard_optimizer;     // master weights and moments: a rank's shard only
  bool shard_parameters;    // parameters: a rank's shard only, gathered by the gate
  bool reduce_every_micro;  // gradients: reduced in every micro-batch; else kept whole until the boundary
};

inline constexpr std::array<StagePolicy, 4> kStages = {{
    {false, false, false},  // 0: plain data parallelism
    {true, false, false},   // 1: optimizer states
    {true, false, true},    // 2: and gradients
    {true, true, true},     // 3: and parameters
}};

/// The policy where ranks share memory: the host holds once what a stage would keep whole on each rank, which steps its
/// part of it and reads all, and no parameter needs to be gathered.
constexpr StagePolicy on_one_host(StagePolicy policy) { return {true, false, policy.reduce_every_micro}; }

}  // namespace deeptide::zero
