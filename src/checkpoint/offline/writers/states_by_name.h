// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Says what a checkpoint's state has of each parameter by name: its count of steps, and its group.
#pragma once

#include <string>

#include "base/libraries/nlohmann.h"
#include "deeptide/checkpoint.h"
#include "deeptide/errors.h"

namespace deeptide::checkpoint {

class StatesByName {
 public:
  StatesByName(const CheckpointReader& reader, size_t num_groups)
      : state_(nlohmann::json::parse(reader.state_json(), nullptr, /*allow_exceptions=*/false)),
        folder_(reader.folder()),
        num_groups_(num_groups) {}

  float steps_of(const std::string& name) const {
    const auto own = find("parameter_steps", name);
    return own.is_number() ? own.get<float>() : static_cast<float>(state_.value("optimizer_steps", int64_t{0}));
  }
  /// Errors: CheckpointError for a checkpoint of several groups that does not say which has the parameter.
  size_t group_of(const std::string& name) const {
    const auto own = find("parameter_groups", name);
    if (own.is_number_unsigned() && own.get<size_t>() < num_groups_) return own.get<size_t>();
    if (num_groups_ < 2) return 0;
    throw CheckpointError("the checkpoint " + folder_ + " has " + std::to_string(num_groups_) +
                          " parameter groups and does not say which has '" + name +
                          "', as saves of this version do; load it and save it again");
  }

 private:
  nlohmann::json find(const char* key, const std::string& name) const {
    const auto entries = state_.find(key);
    if (entries == state_.end() || !entries->is_object()) return nullptr;
    const auto found = entries->find(name);
    return found == entries->end() ? nlohmann::json() : *found;
  }

  const nlohmann::json state_;
  const std::string folder_;
  const size_t num_groups_;
};

}  // namespace deeptide::checkpoint
