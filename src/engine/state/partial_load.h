// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Loads what a checkpoint has where it has not all: what is missing is told, and stays as it is.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/load/reader.h"
#include "engine/bind/bound_model.h"
#include "engine/run/progress.h"
#include "zero/states/optimizer_states.h"

namespace deeptide::engine {

/// Whether a save left out the optimizer's states: a key of its `state`.
inline constexpr const char* kWeightsOnly = "weights_only";
/// The key of frozen parameters' names that a save left out.
inline constexpr const char* kLeftOut = "frozen_left_out";

std::set<std::string> frozen_names(const BoundModel& model);

/// Takes frozen parameters out of what is to be saved and writes their names into the checkpoint's `state`.
void leave_out_frozen(const BoundModel& model, std::vector<checkpoint::Piece>& pieces, std::vector<NamedTensor>& added,
                      nlohmann::json& state);

/// Tensors that an engine wants and a checkpoint lacks, as far as a load may go on without them: all in a load that is
/// not strict, else frozen parameters that the save left out.
class Absent {
 public:
  Absent(const checkpoint::Reader& reader, bool strict);

  /// Takes out of `wanted` what is absent. States whose weight is there begin anew, others stay with their weight.
  void take_from(std::vector<checkpoint::Piece>& wanted);
  /// Takes out tensors that are not the engine's; `role_of`: under which the checkpoint would have one.
  template <typename RoleOf>
  void take_from(std::vector<NamedTensor>& loose, RoleOf role_of) {
    std::erase_if(loose, [&](const NamedTensor& tensor) {
      return is_absent({tensor.name, role_of(tensor.name)}, /*trained=*/false) && kept_.insert(tensor.name).second;
    });
  }
  bool empty() const { return kept_.empty() && fresh_.empty(); }
  /// States of the optimizer that are to be zeroed.
  const std::set<zero::StateName>& fresh() const { return fresh_; }
  /// Gives what stays, or begins anew, its own counts in what is to be restored.
  void keep_counts(Progress& saved, const Progress& own) const;
  /// Writes on rank 0 what is absent here, and what only the checkpoint has: `unexpected`, a line each.
  void tell(const std::vector<std::string>& unexpected) const;

 private:
  bool is_absent(const checkpoint::TensorId& id, bool trained) const;

  bool strict_;
  std::set<checkpoint::TensorId> there_;
  std::set<std::string> left_out_;  // by the save
  std::set<std::string> kept_;      // weights and buffers that stay as they are
  std::set<zero::StateName> fresh_;
};

}  // namespace deeptide::engine
