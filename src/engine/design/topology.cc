// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Looks names up; the mesh does the rest.
#include "engine/design/topology.h"

namespace deeptide::engine {

std::vector<world::Axis> Topology::data_axes() const {
  if (mesh.size(world::Axis::expert) == 1) return {world::Axis::data};
  return {world::Axis::data, world::Axis::expert};
}

int Topology::tenancy_of(const std::string& name) const {
  for (size_t i = 0; i < tenancies.size(); ++i) {
    if (name.starts_with(tenancies[i].prefix)) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace deeptide::engine
