// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads what single keys of the configuration mean to an engine, and what a rule needs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "deeptide/engine.h"
#include "optim/rules/rule.h"
#include "zero/states/state_forecast.h"

namespace deeptide::engine {

/// Blocks of gradients in files that are in memory at a time: one in use, others read or written.
inline constexpr int kGradientBlocks = 6;

/// The caller's own rule, or that of the configuration; null: no optimizer.
std::shared_ptr<const optim::Rule> rule_of(const Config& config, const InitOptions& options);
/// Whether each rank steps whole parameters with states of its own, and exchanges signs. Null: no.
bool keeps_whole_states(const optim::Rule* rule);
/// Whether its steps take what the ranks that share a parameter have of it, beside the norms of gradients' steps.
bool joins_slices(const optim::Rule* rule);
/// Whether the caller's own optimizer steps. Null: no.
bool is_callers(const optim::Rule* rule);
/// Whether the rule steps each element by itself, with states of it alone.
bool steps_elements(const optim::Rule& rule);

at::ScalarType scalar_type(DataType type);
/// The data type in which gradients travel.
at::ScalarType reduce_type(const Config& config);
/// Bits of an element of a gradient that travels; 0: it has the type above.
int quantized_bits(const Config& config);
/// The data type of their sums, over micro-batches and ranks.
at::ScalarType accumulate_type(const Config& config);

/// The types of masters and states, all beside the parameters. `rule`: null: there are none.
zero::StateTypes state_types(const Config& config, const optim::Rule* rule);

/// The share of `total` bytes that has to go elsewhere, so that `memory` holds no more than it may though a split is
/// exact to half a block only. Units: bytes.
double share_beyond(const MemoryShare& memory, int64_t total, int64_t half_block);
/// Whether a kind that is placed so goes to files.
bool wants_files(const std::optional<MemoryShare>& memory);
bool has_parameters_in_files(const Config& config);
bool has_states_in_files(const Config& config);
/// Whether shards of such a device's parameters lie elsewhere.
bool places_parameters(const Config& config, at::Device device);

/// The share of such a device's elements whose states lie off it and that the host steps; at most, if it is measured.
double share_on_host(const Config& config, at::Device device);
/// Whether a start measures the share of states in files, or off a device: the keys then give the most that there may
/// be.
bool measures_ratio(const Config& config);
/// Whether ranks of one host may have one copy of the parameters.
bool may_share_memory(const Config& config);

}  // namespace deeptide::engine
