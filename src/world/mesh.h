// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Arranges the ranks in a grid with named axes, over which parameters are sharded and reduced.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace deeptide::world {

/// Axes, outermost first. Neighbours in rank order differ in the innermost axis, which communicates most.
enum class Axis : uint8_t { pipe, data, expert, sequence, tensor };
inline constexpr int kNumAxes = 5;
const char* axis_name(Axis axis);

/// A dense grid of ranks. Value type.
class Mesh {
 public:
  using Sizes = std::array<int, kNumAxes>;
  using Coordinates = std::array<int, kNumAxes>;

  /// Errors: ConfigError if a size is not positive or the product is not `world_size`.
  Mesh(int world_size, const Sizes& sizes);
  /// Returns a mesh with all ranks on the data axis.
  static Mesh data_parallel(int world_size);

  int num_ranks() const;
  const Sizes& sizes() const { return sizes_; }
  int size(Axis axis) const { return sizes_[static_cast<int>(axis)]; }
  Coordinates coordinates(int rank) const;
  int rank(const Coordinates& coordinates) const;
  /// Returns the ranks that differ from `rank` only along `axis`, in axis order, including `rank`.
  std::vector<int> peers(int rank, Axis axis) const;
  /// A rank as people read of it: "rank 5", with its coordinates where there is more than the data axis: "rank 5
  /// (pipeline 1, data 0, tensor 1)".
  std::string name(int rank) const { return "rank " + std::to_string(rank) + place(rank); }
  /// The coordinates in it: " (pipeline 1, data 0, tensor 1)"; empty where data is the only axis.
  std::string place(int rank) const;
  /// Returns the axes larger than one, such as "data=4" or "pipe=2 data=4"; "data=1" if there are none.
  std::string text() const;

 private:
  Sizes sizes_;
};

}  // namespace deeptide::world
