// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Converts between ranks and coordinates in row-major order.
#include "world/mesh.h"

#include <functional>
#include <iterator>
#include <numeric>

#include "deeptide/errors.h"

namespace deeptide::world {

const char* axis_name(Axis axis) {
  static constexpr const char* kNames[] = {"pipe", "data", "expert", "sequence", "tensor"};
  static_assert(std::size(kNames) == kNumAxes, "one name per axis");
  return kNames[static_cast<int>(axis)];
}

Mesh::Mesh(int world_size, const Sizes& sizes) : sizes_(sizes) {
  int64_t product = 1;
  for (int i = 0; i < kNumAxes; ++i) {
    if (sizes[i] < 1) {
      throw ConfigError(std::string("mesh axis '") + axis_name(static_cast<Axis>(i)) + "' has size " +
                        std::to_string(sizes[i]) + ", expected at least 1");
    }
    product *= sizes[i];
  }
  if (product != world_size) {
    throw ConfigError("the mesh " + text() + " has " + std::to_string(product) + " ranks, but the world has " +
                      std::to_string(world_size));
  }
}

Mesh Mesh::data_parallel(int world_size) {
  Sizes sizes;
  sizes.fill(1);
  sizes[static_cast<int>(Axis::data)] = world_size;
  return Mesh(world_size, sizes);
}

int Mesh::num_ranks() const { return std::accumulate(sizes_.begin(), sizes_.end(), 1, std::multiplies<>()); }

Mesh::Coordinates Mesh::coordinates(int rank) const {
  Coordinates coordinates{};
  for (int i = kNumAxes - 1; i >= 0; --i) {
    coordinates[i] = rank % sizes_[i];
    rank /= sizes_[i];
  }
  return coordinates;
}

int Mesh::rank(const Coordinates& coordinates) const {
  int rank = 0;
  for (int i = 0; i < kNumAxes; ++i) rank = rank * sizes_[i] + coordinates[i];
  return rank;
}

std::vector<int> Mesh::peers(int of, Axis axis) const {
  Coordinates coordinates = this->coordinates(of);
  std::vector<int> ranks;
  for (int i = 0; i < size(axis); ++i) {
    coordinates[static_cast<int>(axis)] = i;
    ranks.push_back(rank(coordinates));
  }
  return ranks;
}

std::string Mesh::place(int rank) const {
  if (size(Axis::data) == num_ranks()) return "";
  const Coordinates coordinates = this->coordinates(rank);
  std::string text;
  for (int i = 0; i < kNumAxes; ++i) {
    const auto axis = static_cast<Axis>(i);
    if (sizes_[i] == 1 && axis != Axis::data) continue;
    const char* const name = axis == Axis::pipe ? "pipeline" : axis_name(axis);  // the configuration's word
    text += (text.empty() ? " (" : ", ") + std::string(name) + " " + std::to_string(coordinates[i]);
  }
  return text + ")";
}

std::string Mesh::text() const {
  std::string text;
  for (int i = 0; i < kNumAxes; ++i) {
    if (sizes_[i] == 1) continue;
    text += (text.empty() ? "" : " ") + std::string(axis_name(static_cast<Axis>(i))) + "=" + std::to_string(sizes_[i]);
  }
  return text.empty() ? "data=1" : text;
}

}  // namespace deeptide::world
