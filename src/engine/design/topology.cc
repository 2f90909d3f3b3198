// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Looks names up; the mesh does the rest.
#include "engine/design/topology.h"

namespace deeptide::engine {

std::vector<world::Axis> Topology::data_axes() const {
  std::vector<world::Axis> axes{world::Axis::data};
  for (const world::Axis axis : {world::Axis::expert, world::Axis::tensor}) {
    if (mesh.size(axis) > 1) axes.push_back(axis);
  }
  return axes;
}

int Topology::tenancy_of(const std::string& name) const {
  for (size_t i = 0; i < tenancies.size(); ++i) {
    const Tenancy& tenancy = tenancies[i];
    const bool is_listed = tenancy.names.empty() ? name.starts_with(tenancy.prefix) : tenancy.names.contains(name);
    if (is_listed) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace deeptide::engine
