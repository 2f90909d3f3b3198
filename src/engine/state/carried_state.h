// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hands an engine's state to the one that takes its place after the program has changed the model's parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/bind/bound_model.h"
#include "engine/run/progress.h"
#include "engine/run/rewind.h"

namespace deeptide::engine {

/// A trained parameter's master and optimizer states, as the ranks before had them: one slice per rank.
struct CarriedParameter {
  std::string name;                          // as it was
  at::Tensor tensor;                         // what identifies it: names may change
  int64_t offset = 0;                        // in its unit, elements
  int64_t numel = 0;                         // its own
  at::Tensor resized;                        // (now,) its values where it has other rows now; else undefined
  int64_t shard = 0;                         // a rank's elements of its unit
  std::map<std::string, at::Tensor> states;  // by role: this rank's elements, none perhaps

  /// The elements [first, last) of the parameter that the rank of this index has.
  std::pair<int64_t, int64_t> slice_of(int rank) const;
};

/// A parameter that was sharded, with its whole value: it needs memory of its own between two engines.
struct WholeValue {
  at::Tensor tensor;
  at::Tensor value;
};

/// The rest of an engine, for the one as it was, if the model is refused.
struct CarriedAsBefore {
  std::vector<ParameterGroup> groups;  // with the hyper-parameters where the schedule starts
  std::vector<at::Tensor> errors;      // Impl::errors; any engine whose units are cut alike takes them, too
  Rewind::Kept rewind;
};

/// The states are views of the engine's memory and keep it.
struct CarriedState {
  Progress progress;
  std::optional<bool> boundary;  // the program's own, until its next one
  CarriedAsBefore as_before;
  std::vector<CarriedParameter> parameters;
  std::vector<WholeValue> wholes;

  /// Null: the parameter was not trained.
  const CarriedParameter* find(const sharding::Parameter& p) const;
  const CarriedParameter* find(const at::Tensor& tensor) const;
  /// Gives what was sharded its own memory. For the time when no engine has it.
  void make_whole();
};

}  // namespace deeptide::engine
