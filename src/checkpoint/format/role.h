// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Says what a saved tensor is to the model, and whose it is: roles and mesh coordinates.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace deeptide::checkpoint {

/// A rank's place on the named axes of its mesh, such as {"data": 1}. An axis that is not named is at 0, so a mesh with
/// further axes of size 1 gives equal coordinates. The default is the origin.
class Coordinates {
 public:
  Coordinates() = default;
  explicit Coordinates(const std::map<std::string, int64_t>& indices);
  /// The axes that are not at 0.
  const std::map<std::string, int64_t>& indices() const { return indices_; }
  bool is_origin() const { return indices_.empty(); }
  /// "data=1,tensor=2"; "origin" where all axes are at 0.
  std::string text() const;
  bool operator==(const Coordinates&) const = default;
  bool operator<(const Coordinates& other) const { return indices_ < other.indices_; }

 private:
  std::map<std::string, int64_t> indices_;
};

/// A parameter's master weights, its weights where it has no master, an optimizer moment, or a buffer. Each rank has
/// buffers of its own, told apart by its coordinates.
class Role {
 public:
  enum class Kind : uint8_t { master, param, moment, buffer };

  static Role master() { return Role(Kind::master); }
  static Role param() { return Role(Kind::param); }
  /// Errors: CheckpointError for a name that is empty, reserved ("master", "param", "buffer", "buffer.…") or has '/' or
  /// '@', which keys need.
  static Role moment(const std::string& name);
  static Role buffer(const Coordinates& coordinates = {});
  /// The error that rounding has left of a rank's gradients: a moment that each rank has for itself.
  static Role rounding_error(const Coordinates& coordinates);

  Kind kind() const { return kind_; }
  /// "exp_avg"; empty for other kinds.
  const std::string& moment_name() const { return moment_name_; }
  /// The place of a buffer's rank; the origin for other kinds.
  const Coordinates& coordinates() const { return coordinates_; }
  bool is_weight() const { return kind_ == Kind::master || kind_ == Kind::param; }
  bool is_moment() const { return kind_ == Kind::moment; }
  bool is_buffer() const { return kind_ == Kind::buffer; }
  bool is_rounding_error() const;
  /// Whether each rank has its own.
  bool is_of_one_rank() const { return is_buffer() || is_rounding_error(); }
  /// "master", "param", a moment's name, "buffer" (at the origin), "buffer.data=1". Unique; has no '/' and no '@'.
  std::string text() const;
  bool operator==(const Role&) const = default;
  bool operator<(const Role& other) const { return text() < other.text(); }

 private:
  explicit Role(Kind kind) : kind_(kind) {}
  Kind kind_;
  std::string moment_name_;
  Coordinates coordinates_;
};

/// One logical tensor of a checkpoint.
struct TensorId {
  std::string name;
  Role role;
  bool operator==(const TensorId&) const = default;
  bool operator<(const TensorId& other) const { return name != other.name ? name < other.name : role < other.role; }
};

}  // namespace deeptide::checkpoint
