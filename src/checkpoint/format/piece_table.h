// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which regions of which logical tensors lie where: the table of one rank, and of a whole checkpoint.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/content_hash.h"
#include "checkpoint/format/region.h"
#include "checkpoint/format/role.h"

namespace deeptide::checkpoint {

/// A saved region: its elements lie side by side in a file.
struct Extent {
  Region region;
  std::string file;                   // in the checkpoint's folder
  int64_t offset = 0;                 // bytes from the start of the file
  std::vector<ContentHash> hashes{};  // of its blocks; empty where the save has none
  Shape strides{};  // in elements, of a whole tensor that others saved in another order; empty: the region's order
};

struct Logical {
  TensorId id;
  Shape shape;
  at::ScalarType dtype = at::ScalarType::Float;
  std::string key;              // in the shards' headers
  std::vector<Extent> extents;  // in the order of their first elements; none is empty, no two share an element
};
using Table = std::map<TensorId, Logical>;

/// "<name>/<role>": unique, since a role has no '/'.
std::string tensor_key(const TensorId& id);
/// The header's key for one of several regions that a rank has of a tensor: "<key>@4", "<key>@0,8" for a box.
std::string region_key(const std::string& key, const Region& region);
/// "(2, 3)".
std::string shape_text(const Shape& shape);

/// The tensor's entry in `table`, which is made when there is none. Errors: CheckpointError when the entry has another
/// shape or dtype.
Logical& declare(Table& table, const TensorId& id, const Shape& shape, at::ScalarType dtype);
/// Sorts extents. Errors: CheckpointError, naming tensor and regions, when they share elements or leave the tensor.
void check_extents(Table& table, const std::string& where);

}  // namespace deeptide::checkpoint
