// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Regions of a logical tensor: n-dimensional boxes, and ranges of the flattened tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace deeptide::checkpoint {

using Shape = std::vector<int64_t>;

/// A box: offsets[d] <= index < offsets[d] + sizes[d] in each dimension d. With one dimension it is a range of the
/// flattened tensor (any tensor has those); with as many dimensions as the tensor it is a box of the tensor. For a
/// one-dimensional tensor the two are the same. Its elements are in row-major order, hence in flattened order too.
struct Region {
  std::vector<int64_t> offsets{0};
  std::vector<int64_t> sizes{0};

  static Region range(int64_t begin, int64_t end) { return {{begin}, {end - begin}}; }
  /// Elements. The region must fit its tensor.
  int64_t numel() const;
  /// "[2, 5)" for a range, "[0:4, 2:6]" for a box.
  std::string text() const;
  bool operator==(const Region&) const = default;
};

/// Whether `region` has the dimensions of a range or of `shape`, and lies within. The functions below require it, and a
/// shape whose number of elements fits int64.
bool fits(const Region& region, const Shape& shape);

/// The shared box of two regions that have equally many dimensions; none when they share no element.
std::optional<Region> intersect(const Region& a, const Region& b);
/// Elements that two regions share, in closed form.
int64_t num_shared(const Shape& shape, const Region& a, const Region& b);
/// The first flattened element that two regions share; -1 when they share none.
int64_t first_shared(const Shape& shape, const Region& a, const Region& b);
bool contains(const Shape& shape, const Region& outer, const Region& inner);

/// The contiguous runs of a region in the flattened tensor, in order: all have the same length.
class Runs {
 public:
  Runs(const Shape& shape, const Region& region);
  int64_t count() const { return count_; }
  int64_t length() const { return length_; }
  /// The first flattened element of run `number`.
  int64_t begin(int64_t number) const;
  /// One past the last flattened element of the last run; 0 without runs.
  int64_t end() const { return count_ == 0 ? 0 : begin(count_ - 1) + length_; }

 private:
  struct Outer {  // a dimension that runs do not span
    int64_t size;
    int64_t stride;
  };
  std::vector<Outer> outer_;  // innermost first
  int64_t first_ = 0;
  int64_t count_ = 0;
  int64_t length_ = 0;
};

/// Elements that lie side by side in two regions: `count` of them, from position `a` of one and `b` of the other.
struct SharedRun {
  int64_t a;
  int64_t b;
  int64_t count;
};
/// Visits what two regions share, in order, in as few runs as possible.
void for_each_shared_run(const Shape& shape, const Region& a, const Region& b,
                         const std::function<void(const SharedRun&)>& visit);

/// The boxes, in order, that together are elements [begin, end) of the flattened tensor: at most 2 d - 1 for d
/// dimensions, which are one or more.
std::vector<Region> boxes_of(const Shape& shape, int64_t begin, int64_t end);

/// The first elements of `wanted` that none of `regions` holds, as a range of the flattened tensor.
std::optional<Region> first_uncovered(const Shape& shape, const Region& wanted, const std::vector<Region>& regions);

}  // namespace deeptide::checkpoint
