// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The tables of a checkpoint that others wrote, as they are collected: elements stay in the files that have them.
#pragma once

#include <map>
#include <string>

#include "checkpoint/format/piece_table.h"
#include "checkpoint/imports/archives/torch_file.h"
#include "deeptide/hyperparameters.h"

namespace deeptide::checkpoint {

/// Ends the name of a moment that is one value of a parameter, and has not its elements.
inline constexpr const char* kWholeState = ":whole";

/// Elements of a tensor in a file: from its element `first` on, in the order of memory.
struct ForeignElements {
  const TorchFile& file;
  std::string name;  // of the file in its folder
  TorchTensor tensor;
  int64_t first = 0;
};

/// Adds a whole tensor, of any strides, to `table`.
void add_foreign(Table& table, const TensorId& id, const std::string& file, const TorchTensor& tensor);

class ForeignTable {
 public:
  /// `optimizer`: whose states the checkpoint has, in the configuration's words; null: not known.
  explicit ForeignTable(const OptimizerInfo* optimizer) : optimizer_(optimizer) {}

  /// Adds the region of a logical tensor. Errors: CheckpointError naming it, when the elements are not all there.
  void add(const TensorId& id, const Shape& shape, const Region& region, const ForeignElements& elements);
  void add_whole(const TensorId& id, const std::string& file, const TorchTensor& tensor) {
    add_foreign(table_, id, file, tensor);
  }
  /// The role of an optimizer's state by its name there; none for what our optimizer of that name does not keep.
  std::optional<Role> role_of(const std::string& state) const;
  /// A state that is one value of a parameter, such as a count, which the program's own optimizer may read.
  void add_value(const std::string& parameter, const std::string& state, const std::string& file,
                 const TorchTensor& tensor);
  /// A parameter's count of steps, of which the highest counts.
  void count_steps(const std::string& parameter, double steps);

  bool has(const std::string& name) const;
  const std::map<std::string, int64_t>& steps() const { return steps_; }
  /// Errors: CheckpointError naming a tensor that is not whole, or whose regions overlap.
  Table finish(const std::string& folder);

 private:
  const OptimizerInfo* optimizer_;
  Table table_;
  std::map<std::string, int64_t> steps_;
};

}  // namespace deeptide::checkpoint
