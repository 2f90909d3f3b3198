// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Joins the slices that tensor-parallel ranks have of parameters, as DeepSpeed's universal_checkpoint_info says.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/libraries/pattern.h"
#include "checkpoint/imports/foreign_table.h"

namespace deeptide::checkpoint {

class TensorSlices {
 public:
  /// `info`: the patterns by which parameters are joined, in `file`; null: the checkpoint does not say.
  TensorSlices(const TorchFile& file, const PickleValue* info, int64_t count)
      : file_(file), info_(info), count_(count) {}

  /// Tells a slice's shape, for each slice before anything is added; the first shape that is told counts.
  void note(const std::string& name, int64_t slice, const Shape& shape);
  /// Buffers that no pattern names are the same on all ranks.
  void note_buffer(const std::string& name) { buffers_.insert(name); }
  /// Adds elements of a slice at their places in the whole tensor. `shape`, `region`: in the slice, a range.
  /// Errors: CheckpointError naming the tensor, and what the checkpoint does not say of it.
  void add(int64_t slice, const TensorId& id, const Shape& shape, const Region& region, const ForeignElements& elements,
           ForeignTable& table) const;
  /// A whole slice, of any strides where there is but one.
  void add_whole(int64_t slice, const TensorId& id, const ForeignElements& elements, ForeignTable& table) const;

 private:
  /// Indices of a slice in the dimension that is cut, and their places in the whole tensor.
  struct Band {
    int64_t here = 0, size = 0, there = 0;
  };
  struct Layout {
    bool is_replicated = false;
    size_t dim = 0;
    Shape whole;
    std::vector<Band> bands;
  };

  const Layout& layout_of(const std::string& name, int64_t slice, const Shape& shape) const;
  Layout make_layout(const std::string& name, int64_t slice) const;
  Layout cut_evenly(const std::string& name, int64_t slice, size_t dim, int64_t parts) const;
  Layout cut_as_listed(const std::string& name, int64_t slice, const PickleValue& spec) const;
  std::vector<std::vector<int64_t>> widths_of(const std::string& name, const PickleValue& spec, size_t dim) const;
  void strip_padding(const std::string& name, Layout& layout) const;
  void compare_with_map(const std::string& name, int64_t slice, const Layout& layout) const;
  bool is_in(const char* list, const std::string& name) const;
  bool matches(const PickleValue& pattern, const std::string& name) const;
  [[noreturn]] void refuse(const std::string& name, const std::string& why) const;

  const TorchFile& file_;
  const PickleValue* info_;
  int64_t count_;
  std::map<std::string, std::map<int64_t, Shape>> shapes_;  // by name and slice
  std::set<std::string> buffers_;
  mutable std::map<const PickleValue*, Pattern> patterns_;             // those that were asked for
  mutable std::map<std::pair<std::string, int64_t>, Layout> layouts_;  // likewise, by name and slice
};

}  // namespace deeptide::checkpoint
