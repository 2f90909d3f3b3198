// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The model in one of DeepSpeed's checkpoints: the names, shapes and weights of each pipeline stage and tensor slice.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/imports/archives/torch_file.h"
#include "checkpoint/imports/deepspeed_folder.h"
#include "checkpoint/imports/tensor_slices.h"

namespace deeptide::checkpoint {

/// A tensor of the module under its first name.
struct ModuleTensor {
  std::string name;
  TorchTensor tensor;
  bool buffer = false;
  const TorchFile* file = nullptr;
  std::string file_name;  // in the folder
};

class DeepspeedModel {
 public:
  /// Errors: CheckpointError naming what is missing or malformed.
  explicit DeepspeedModel(const std::string& path);

  const DeepspeedFolder& folder() const { return folder_; }
  int64_t num_stages() const { return num_stages_; }
  int64_t num_slices() const { return num_slices_; }
  /// Has the counters, the configuration and the client state.
  const TorchFile& first() const { return *files_.front(); }
  const DeepspeedPart& part(int64_t stage, int64_t slice) const { return folder_.parts[index(stage, slice)]; }
  /// The model file of its first data-parallel rank.
  const TorchFile& file(int64_t stage, int64_t slice) const { return *files_[index(stage, slice)]; }
  /// The tensors of all stages, under the names of the uncut model: "3.weight" of layer 3, "tied_modules.KEY.weight".
  const std::vector<ModuleTensor>& module(int64_t slice) const { return modules_[static_cast<size_t>(slice)]; }
  /// The shapes of what a part trains, as it has them; without a list of them, of all that a slice of the module has.
  std::map<std::string, Shape> shapes(int64_t stage, int64_t slice) const;
  /// How slices are joined.
  const TensorSlices& slices() const { return *slices_; }

 private:
  size_t index(int64_t stage, int64_t slice) const { return static_cast<size_t>(stage * num_slices_ + slice); }
  void count_parts();
  void read_module(int64_t slice);
  std::map<std::string, int64_t> trained_sizes(int64_t slice) const;
  void note_shapes();

  DeepspeedFolder folder_;
  std::vector<std::unique_ptr<const TorchFile>> files_;   // of the parts
  std::vector<std::unique_ptr<const TorchFile>> layers_;  // of a pipeline
  int64_t num_stages_ = 1;
  int64_t num_slices_ = 1;
  std::vector<std::vector<ModuleTensor>> modules_;  // by slice
  std::unique_ptr<TensorSlices> slices_;
};

/// The parameters of a group, in the order in which they are flattened.
std::vector<std::pair<std::string, Shape>> shapes_of_group(const TorchFile& model, const PickleValue& group);

}  // namespace deeptide::checkpoint
