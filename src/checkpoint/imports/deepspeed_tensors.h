// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds the tensors of DeepSpeed's checkpoints, at each stage and in the universal form.
#pragma once

#include "checkpoint/imports/deepspeed_model.h"
#include "checkpoint/imports/foreign_table.h"

namespace deeptide::checkpoint {

/// Stages 1 and 2: each rank has a range of every parameter group, all its parameters side by side in the order of the
/// model file's param_shapes. Stage 3: each rank has a slice of every parameter. Masters and states only.
void read_zero_partitions(const DeepspeedModel& model, ForeignTable& table);
/// Stage 0: masters and states by the number of the parameter.
/// Errors: CheckpointError when more than one parameter could have a number's state.
void read_unsharded_states(const DeepspeedModel& model, ForeignTable& table);
/// zero/<parameter>/<state>.pt.
void read_universal_states(const DeepspeedModel& model, ForeignTable& table);
/// Frozen parameters and buffers, and weights that have no master: what is not in `table` yet.
void read_module(const DeepspeedModel& model, ForeignTable& table);

/// The file's values under `key`. Errors: CheckpointError naming both when there are none.
const PickleValue& member(const TorchFile& file, const PickleValue& mapping, const char* key);
/// The state of one base optimizer: {"state": …, "param_groups": …}; null: none was saved.
const PickleValue* base_optimizer(const PickleValue& states);
/// The whole number of a value. Errors: CheckpointError when it is none.
int64_t integer_in(const TorchFile& file, const PickleValue& value);

}  // namespace deeptide::checkpoint
