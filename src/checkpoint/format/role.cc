// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Says what a saved tensor is to the model, and whose it is: roles and mesh coordinates.
#include "checkpoint/format/role.h"

#include "deeptide/errors.h"

namespace deeptide::checkpoint {
namespace {

constexpr const char* kMaster = "master";
constexpr const char* kParam = "param";
constexpr const char* kBuffer = "buffer";
constexpr const char* kRoundingError = "rounding_error";

}  // namespace

Coordinates::Coordinates(const std::map<std::string, int64_t>& indices) {
  for (const auto& [axis, index] : indices) {
    if (axis.empty() || axis.find_first_of("/@=,") != std::string::npos || index < 0) {
      throw CheckpointError("'" + axis + "=" + std::to_string(index) + "' is not a mesh coordinate");
    }
    if (index > 0) indices_.emplace(axis, index);
  }
}

std::string Coordinates::text() const {
  if (is_origin()) return "origin";
  std::string text;
  for (const auto& [axis, index] : indices_) text += (text.empty() ? "" : ",") + axis + "=" + std::to_string(index);
  return text;
}

Role Role::moment(const std::string& name) {
  if (name.empty() || name.find_first_of("/@") != std::string::npos || name == kMaster || name == kParam ||
      name == kBuffer || name.starts_with(std::string(kBuffer) + ".")) {
    throw CheckpointError("'" + name + "' cannot name an optimizer moment: it is empty, reserved or has '/' or '@'");
  }
  Role role(Kind::moment);
  role.moment_name_ = name;
  return role;
}

Role Role::buffer(const Coordinates& coordinates) {
  Role role(Kind::buffer);
  role.coordinates_ = coordinates;
  return role;
}

Role Role::rounding_error(const Coordinates& coordinates) {
  return moment(std::string(kRoundingError) + "." + coordinates.text());
}

bool Role::is_rounding_error() const {
  return is_moment() && moment_name_.starts_with(std::string(kRoundingError) + ".");
}

std::string Role::text() const {
  switch (kind_) {
    case Kind::master:
      return kMaster;
    case Kind::param:
      return kParam;
    case Kind::moment:
      return moment_name_;
    case Kind::buffer:
      return coordinates_.is_origin() ? kBuffer : std::string(kBuffer) + "." + coordinates_.text();
  }
  return "";
}

}  // namespace deeptide::checkpoint
