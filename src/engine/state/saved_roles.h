// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Says in which roles a checkpoint has what an engine wants.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/load/reader.h"

namespace deeptide::engine {

/// The roles in which a checkpoint has values that a module holds: weights, and buffers as this rank takes them.
class SavedRoles {
 public:
  /// A rank that the saved mesh did not have takes the buffers of the rank at the origin.
  SavedRoles(const checkpoint::Reader& reader, const checkpoint::Coordinates& coordinates);
  std::optional<checkpoint::Role> weight(const std::string& name) const {
    const auto found = weights_.find(name);
    return found == weights_.end() ? std::nullopt : std::optional(found->second);
  }
  /// Whether or not there is such a buffer.
  const checkpoint::Role& buffer() const { return buffer_; }
  bool has_buffer(const std::string& name) const { return buffers_.contains(name); }
  bool has_torchs_momentum(const std::string& name) const { return torchs_momenta_.contains(name); }
  bool has(const std::string& name) const { return weights_.contains(name) || has_buffer(name); }

 private:
  checkpoint::Role buffer_;
  std::map<std::string, checkpoint::Role> weights_;
  std::set<std::string> buffers_, torchs_momenta_;
};

/// Maps roles: a checkpoint without optimizer has "param" where an engine with one has "master", and vice versa. What
/// was added to the model after initialize was saved like a buffer. SGD's momentum has torch's name in what others
/// saved.
void translate_roles(const SavedRoles& saved, std::vector<checkpoint::Piece>& wanted);
/// The role in which the checkpoint has a value of this name for a tensor that is not the engine's. A replaced
/// parameter that was not one when it was saved takes the value of the trained one.
checkpoint::Role loose_role(const SavedRoles& saved, const std::string& name);

}  // namespace deeptide::engine
