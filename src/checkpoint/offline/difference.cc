// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Compares the tensors of two checkpoints, block by block.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "checkpoint/offline/conversion.h"
#include "checkpoint/offline/writers/parts.h"

namespace deeptide {

namespace {

using c10::ScalarType;
using Kind = CheckpointDifference::Kind;
using Key = std::pair<std::string, std::string>;

/// Compares values, as doubles.
class Comparison {
 public:
  Comparison(ScalarType first, ScalarType second) : first_(first), second_(second) {}

  void add(const char* a, const char* b, int64_t count, CheckpointDifference& difference) {
    checkpoint::to_doubles(first_, a, count, a_);
    checkpoint::to_doubles(second_, b, count, b_);
    for (size_t i = 0; i < std::min(a_.size(), b_.size()); ++i) {
      if (a_[i] == b_[i] || (std::isnan(a_[i]) && std::isnan(b_[i]))) continue;
      ++difference.num_different;
      const double distance = std::abs(a_[i] - b_[i]);
      if (std::isfinite(distance)) difference.max_difference = std::max(difference.max_difference, distance);
    }
  }

 private:
  ScalarType first_, second_;
  std::vector<double> a_, b_;
};

std::string shape_of(const CheckpointTensor& tensor) { return checkpoint::shape_text(tensor.shape); }

/// The values that two tensors of one shape differ in.
void compare_values(const CheckpointReader& first, const CheckpointTensor& a, const CheckpointReader& second,
                    const CheckpointTensor& b, CheckpointDifference& difference) {
  const ScalarType a_type = first.parts().logical(a).dtype;
  const ScalarType b_type = second.parts().logical(b).dtype;
  const int64_t b_width = checkpoint::element_bytes(b_type);
  Comparison comparison(a_type, b_type);
  std::unique_ptr<char[]> other;
  checkpoint::for_each_block(first, a, [&](int64_t begin, int64_t count, const char* data) {
    if (!other) other = std::make_unique_for_overwrite<char[]>(checkpoint::kHashedBlockBytes * b_width);
    second.read_into(b, begin, begin + count, other.get());
    const bool same = a_type == b_type && std::memcmp(data, other.get(), count * b_width) == 0;
    if (!same) comparison.add(data, other.get(), count, difference);
  });
}

/// Nothing where the tensors are equal.
void add_difference(const CheckpointReader& first, const CheckpointTensor& a, const CheckpointReader& second,
                    const CheckpointTensor& b, std::vector<CheckpointDifference>& differences) {
  CheckpointDifference difference{a.name, a.role, Kind::values, {}, {}};
  if (a.shape != b.shape) {
    difference.kind = Kind::shape;
    difference.first = shape_of(a);
    difference.second = shape_of(b);
    differences.push_back(difference);
    return;
  }
  compare_values(first, a, second, b, difference);
  if (a.dtype != b.dtype) {
    difference.kind = Kind::dtype;
    difference.first = a.dtype;
    difference.second = b.dtype;
  }
  if (a.dtype != b.dtype || difference.num_different > 0) differences.push_back(difference);
}

}  // namespace

const char* name_of(Kind kind) {
  static constexpr const char* kNames[] = {"only_first", "only_second", "shape", "dtype", "values"};
  return kNames[static_cast<size_t>(kind)];
}

std::vector<CheckpointDifference> compare_checkpoints(const CheckpointReader& first, const CheckpointReader& second,
                                                      const CheckpointProgress& progress) {
  std::vector<CheckpointDifference> differences;
  std::map<Key, const CheckpointTensor*> others;
  for (const CheckpointTensor& tensor : second.tensors()) others[{tensor.name, tensor.role}] = &tensor;
  std::set<Key> seen;
  int64_t total = 0, done = 0;
  for (const CheckpointTensor& tensor : first.tensors()) total += tensor.bytes;
  for (const CheckpointTensor& a : first.tensors()) {
    seen.insert({a.name, a.role});
    const auto b = others.find({a.name, a.role});
    if (b == others.end()) {
      differences.push_back({a.name, a.role, Kind::only_first, shape_of(a), {}});
    } else {
      add_difference(first, a, second, *b->second, differences);
    }
    done += a.bytes;
    if (progress) progress(done, total);
  }
  for (const CheckpointTensor& b : second.tensors()) {
    if (!seen.contains({b.name, b.role})) {
      differences.push_back({b.name, b.role, Kind::only_second, {}, shape_of(b)});
    }
  }
  return differences;
}

}  // namespace deeptide
