// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Random regions and random partitions of tensors, with a slow enumeration of their elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "checkpoint/format/region.h"

namespace deeptide::checkpoint {

inline int64_t draw(std::mt19937& random, int64_t below) {
  return std::uniform_int_distribution<int64_t>(0, below - 1)(random);
}

inline int64_t product_of(const Shape& shape) {
  int64_t product = 1;
  for (int64_t size : shape) product *= size;
  return product;
}

/// The flattened elements of a region, by trying each element of the tensor.
inline std::vector<int64_t> elements_of(const Shape& shape, const Region& region) {
  std::vector<int64_t> elements;
  for (int64_t element = 0; element < product_of(shape); ++element) {
    const bool range = region.sizes.size() == 1;
    const Shape bounds = range ? Shape{product_of(shape)} : shape;
    int64_t rest = element;
    bool inside = true;
    for (size_t d = bounds.size(); d-- > 0; rest /= bounds[d]) {
      const int64_t index = rest % bounds[d];
      inside = inside && index >= region.offsets[d] && index < region.offsets[d] + region.sizes[d];
    }
    if (inside) elements.push_back(element);
  }
  return elements;
}

/// A range or a box, now and then empty.
inline Region random_region(std::mt19937& random, const Shape& shape) {
  const Shape bounds = draw(random, 2) ? Shape{product_of(shape)} : shape;
  Region region{{}, {}};
  for (int64_t bound : bounds) {
    const int64_t one = draw(random, bound + 1), other = draw(random, bound + 1);
    const bool whole = draw(random, 3) == 0;
    region.offsets.push_back(whole ? 0 : std::min(one, other));
    region.sizes.push_back(whole ? bound : std::max(one, other) - std::min(one, other));
  }
  return region;
}

/// Cuts a box at random places along random dimensions.
inline void cut_box(std::mt19937& random, const Region& box, int depth, std::vector<Region>& parts) {
  const auto d = box.sizes.empty() ? 0 : static_cast<size_t>(draw(random, std::ssize(box.sizes)));
  if (depth == 0 || box.sizes.empty() || box.sizes[d] < 2 || draw(random, 6) == 0) {
    parts.push_back(box);
    return;
  }
  Region low = box, high = box;
  low.sizes[d] = 1 + draw(random, box.sizes[d] - 1);
  high.offsets[d] += low.sizes[d];
  high.sizes[d] -= low.sizes[d];
  cut_box(random, low, depth - 1, parts);
  cut_box(random, high, depth - 1, parts);
}

/// Regions that hold each element of the tensor once: ranges up to a row, boxes from there.
inline std::vector<Region> random_partition(std::mt19937& random, const Shape& shape) {
  const int64_t numel = product_of(shape);
  const int64_t rows = shape.empty() ? draw(random, 2) : draw(random, shape[0] + 1);
  const int64_t boundary = shape.empty() ? rows : shape[0] == 0 ? 0 : rows * (numel / shape[0]);
  std::vector<Region> parts;
  cut_box(random, Region::range(0, boundary), 3, parts);
  Region box{std::vector<int64_t>(shape.size(), 0), shape};
  if (!shape.empty()) {
    box.offsets[0] = rows;
    box.sizes[0] -= rows;
  }
  if (boundary < numel) cut_box(random, box, 5, parts);
  return parts;
}

}  // namespace deeptide::checkpoint
