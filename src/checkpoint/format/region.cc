// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Regions of a logical tensor: n-dimensional boxes, and ranges of the flattened tensor.
#include "checkpoint/format/region.h"

#include <algorithm>
#include <utility>

namespace deeptide::checkpoint {
namespace {

bool is_range(const Region& region) { return region.sizes.size() == 1; }

int64_t product(const std::vector<int64_t>& factors) {
  int64_t value = 1;
  for (int64_t factor : factors) value *= factor;
  return value;
}

// Elements of a region that is not empty before flattened element `flat`: the position of `flat` if the region has it.
int64_t position_of(const Shape& shape, const Region& region, int64_t flat) {
  if (is_range(region)) return std::clamp<int64_t>(flat - region.offsets[0], 0, region.sizes[0]);
  int64_t stride = product(shape);
  int64_t inner = region.numel();
  if (flat >= stride) return inner;
  int64_t position = 0;
  for (size_t d = 0; d < shape.size(); ++d) {
    stride /= shape[d];
    inner /= region.sizes[d];
    const int64_t index = std::exchange(flat, flat % stride) / stride - region.offsets[d];
    position += std::clamp<int64_t>(index, 0, region.sizes[d]) * inner;
    if (index < 0 || index >= region.sizes[d]) break;
  }
  return position;
}

int64_t end_of(const Region& range) { return range.offsets[0] + range.sizes[0]; }

// The overlap of two ranges, the most frequent question: without memory of its own.
int64_t num_shared_by_ranges(const Region& a, const Region& b) {
  return std::max<int64_t>(0, std::min(end_of(a), end_of(b)) - std::max(a.offsets[0], b.offsets[0]));
}

// Joins runs that continue each other in both regions.
class JoinedRuns {
 public:
  explicit JoinedRuns(const std::function<void(const SharedRun&)>& visit) : visit_(visit) {}
  void add(const SharedRun& run) {
    if (run.a == pending_.a + pending_.count && run.b == pending_.b + pending_.count) {
      pending_.count += run.count;
    } else {
      flush();
      pending_ = run;
    }
  }
  void flush() {
    if (pending_.count > 0) visit_(pending_);
  }

 private:
  const std::function<void(const SharedRun&)>& visit_;
  SharedRun pending_{0, 0, 0};
};

// The run of `runs` that contains flattened element `flat`, or else the next one, cut to begin at `flat`.
Region run_from(const Shape& shape, const Region& region, const Runs& runs, int64_t flat) {
  const int64_t number = position_of(shape, region, flat) / runs.length();
  if (number == runs.count()) return {};
  const int64_t begin = runs.begin(number);
  return Region::range(std::max(begin, flat), begin + runs.length());
}

}  // namespace

int64_t Region::numel() const { return product(sizes); }

std::string Region::text() const {
  if (is_range(*this)) return "[" + std::to_string(offsets[0]) + ", " + std::to_string(offsets[0] + sizes[0]) + ")";
  std::string text = "[";
  for (size_t d = 0; d < sizes.size(); ++d) {
    text += (d ? ", " : "") + std::to_string(offsets[d]) + ":" + std::to_string(offsets[d] + sizes[d]);
  }
  return text + "]";
}

bool fits(const Region& region, const Shape& shape) {
  const size_t dims = region.sizes.size();
  if (region.offsets.size() != dims) return false;
  const Shape flattened = {product(shape)};
  if (dims != shape.size() && dims != 1) return false;
  const Shape& bounds = dims == 1 ? flattened : shape;
  for (size_t d = 0; d < dims; ++d) {
    const int64_t size = region.sizes[d];
    if (size < 0 || region.offsets[d] < 0 || size > bounds[d] || region.offsets[d] > bounds[d] - size) return false;
  }
  return true;
}

std::optional<Region> intersect(const Region& a, const Region& b) {
  Region shared = a;
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    shared.offsets[d] = std::max(a.offsets[d], b.offsets[d]);
    shared.sizes[d] = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]) - shared.offsets[d];
    if (shared.sizes[d] <= 0) return std::nullopt;
  }
  return shared;
}

int64_t num_shared(const Shape& shape, const Region& a, const Region& b) {
  if (is_range(a) && is_range(b)) return num_shared_by_ranges(a, b);
  if (a.numel() == 0 || b.numel() == 0) return 0;
  if (a.sizes.size() == b.sizes.size()) {
    const auto shared = intersect(a, b);
    return shared ? shared->numel() : 0;
  }
  const Region& range = is_range(a) ? a : b;
  const Region& box = is_range(a) ? b : a;
  return position_of(shape, box, end_of(range)) - position_of(shape, box, range.offsets[0]);
}

int64_t first_shared(const Shape& shape, const Region& a, const Region& b) {
  if (num_shared(shape, a, b) == 0) return -1;
  if (is_range(a) && is_range(b)) return std::max(a.offsets[0], b.offsets[0]);
  if (a.sizes.size() == b.sizes.size()) return Runs(shape, *intersect(a, b)).begin(0);
  const Region& range = is_range(a) ? a : b;
  const Region& box = is_range(a) ? b : a;
  return run_from(shape, box, Runs(shape, box), range.offsets[0]).offsets[0];
}

bool contains(const Shape& shape, const Region& outer, const Region& inner) {
  return num_shared(shape, outer, inner) == inner.numel();
}

Runs::Runs(const Shape& shape, const Region& region) {
  if (region.numel() == 0) return;
  length_ = count_ = 1;
  if (is_range(region)) {
    length_ = region.sizes[0];
    first_ = region.offsets[0];
    return;
  }
  int64_t stride = 1;
  bool whole = true;  // the region spans all inner dimensions, so its elements in this one are side by side
  for (size_t d = shape.size(); d-- > 0;) {
    first_ += region.offsets[d] * stride;
    if (whole) {
      length_ *= region.sizes[d];
    } else {
      outer_.push_back({region.sizes[d], stride});
      count_ *= region.sizes[d];
    }
    whole = whole && region.sizes[d] == shape[d];
    stride *= shape[d];
  }
}

int64_t Runs::begin(int64_t number) const {
  int64_t element = first_;
  for (const Outer& outer : outer_) element += std::exchange(number, number / outer.size) % outer.size * outer.stride;
  return element;
}

void for_each_shared_run(const Shape& shape, const Region& a, const Region& b,
                         const std::function<void(const SharedRun&)>& visit) {
  if (num_shared(shape, a, b) == 0) return;
  JoinedRuns joined(visit);
  // Two boxes share a box; a box and a range share the box's runs within the range.
  const bool alike = a.sizes.size() == b.sizes.size();
  const Region box = alike ? *intersect(a, b) : is_range(a) ? b : a;
  const Region range = alike ? Region::range(0, product(shape)) : is_range(a) ? a : b;
  const Runs runs(shape, box);
  for (int64_t i = position_of(shape, box, range.offsets[0]) / runs.length(); i < runs.count(); ++i) {
    const int64_t begin = runs.begin(i);
    if (begin >= end_of(range)) break;
    const int64_t from = std::max(begin, range.offsets[0]);
    const int64_t to = std::min(begin + runs.length(), end_of(range));
    joined.add({position_of(shape, a, from), position_of(shape, b, from), to - from});
  }
  joined.flush();
}

std::vector<Region> boxes_of(const Shape& shape, int64_t begin, int64_t end) {
  std::vector<Region> boxes;
  while (begin < end) {
    // The largest box that begins here: whole inner dimensions, as many indices of the next one as there are.
    size_t dim = shape.size() - 1;
    int64_t inner = 1;
    while (dim > 0 && begin % (inner * shape[dim]) == 0 && end - begin >= inner * shape[dim]) inner *= shape[dim--];
    Region box{Shape(shape.size(), 0), Shape(shape.size(), 1)};
    int64_t rest = begin / inner;
    for (size_t d = dim + 1; d-- > 0; rest /= shape[d]) box.offsets[d] = rest % shape[d];
    for (size_t d = dim + 1; d < shape.size(); ++d) box.sizes[d] = shape[d];
    box.sizes[dim] = std::min(shape[dim] - box.offsets[dim], (end - begin) / inner);
    begin += box.sizes[dim] * inner;
    boxes.push_back(std::move(box));
  }
  return boxes;
}

std::optional<Region> first_uncovered(const Shape& shape, const Region& wanted, const std::vector<Region>& regions) {
  std::vector<std::pair<const Region*, Runs>> holders;
  for (const Region& region : regions) {
    if (region.numel() > 0) holders.emplace_back(&region, Runs(shape, region));
  }
  const Runs runs(shape, wanted);
  for (int64_t i = 0; i < runs.count(); ++i) {
    const int64_t end = runs.begin(i) + runs.length();
    for (int64_t element = runs.begin(i); element < end;) {
      int64_t reached = element;
      int64_t next = end;  // the first held element after `element`
      for (const auto& [region, held] : holders) {
        const Region run = run_from(shape, *region, held, element);
        if (run.sizes[0] == 0) continue;
        if (run.offsets[0] == element) {
          reached = std::max(reached, element + run.sizes[0]);
        } else {
          next = std::min(next, run.offsets[0]);
        }
      }
      if (reached == element) return Region::range(element, next);
      element = reached;
    }
  }
  return std::nullopt;
}

}  // namespace deeptide::checkpoint
