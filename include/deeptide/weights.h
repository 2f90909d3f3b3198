// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads what others saved: weights in files of safetensors and torch, in Transformers' layout; DeepSpeed's checkpoints.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "deeptide/export.h"

namespace torch::nn {
class Module;
}

namespace deeptide {

struct NamedTensor;

/// The tensors of a file of safetensors or of torch.save, or of a folder that has `model.safetensors` or
/// `pytorch_model.bin`, or several such files beside an index (`model.safetensors.index.json`). No code that a pickle
/// names is run. Files are mapped: bytes are read where they are used, and the kernel may drop them again. Thread-safe.
class DEEPTIDE_API WeightFile {
 public:
  /// Errors: CheckpointError that names the file and what is wrong with it.
  explicit WeightFile(const std::string& path);
  ~WeightFile();
  WeightFile(WeightFile&&) noexcept;
  WeightFile& operator=(WeightFile&&) noexcept;

  /// Renames what is of a base model for a model with a head that has `names`, or the other way round.
  void fit(const std::vector<std::string>& names);
  /// In the order of their names.
  std::vector<std::string> names() const;
  bool has(const std::string& name) const;
  /// Returns a view of the file, which outlives this object, strided as it was saved. What is written to it stays in
  /// this process.
  /// Errors: CheckpointError if there is no such tensor.
  at::Tensor tensor(const std::string& name) const;

 private:
  struct Contents;
  std::unique_ptr<Contents> contents_;
};

/// The names that only one side has.
struct LoadedWeights {
  std::vector<std::string> missing;     // of the model's parameters and buffers
  std::vector<std::string> unexpected;  // of the file's tensors
};

/// Copies tensors into parameters and buffers of `model` of equal names, cast to their types. Weights of a base model
/// fit a model with a head, and the other way round, as for from_pretrained. A parameter that is tied to a loaded one
/// is not missing. Before the Engine exists; under zero::Init nothing is read until the Engine binds the parameters,
/// unit by unit. Ranks of a host read the same pages. Errors: CheckpointError on other shapes, with nothing copied;
/// with `strict`, also on missing and unexpected names.
DEEPTIDE_API LoadedWeights load_weights(torch::nn::Module& model, const std::string& path, bool strict = true);
/// The same into tensors by name.
DEEPTIDE_API LoadedWeights load_weights(const std::vector<NamedTensor>& targets, const std::string& path,
                                        bool strict = true);

/// Values that torch.load would read, as JSON {"values": {"root": …}, "notes": …, "left_out": […]}; no code that
/// the file names is run, and small tensors are there in full. Errors: CheckpointError naming what is malformed.
DEEPTIDE_API std::string describe_torch_file(const std::string& path);

/// Writes DeepSpeed's checkpoint `<source>/<source_tag>`, of any ZeRO stage, a pipeline or universal, as one of this
/// library: `<directory>/<tag>`, and `<directory>/latest`. One process does it, without model or group, and in little
/// memory. An empty `source_tag` is the one that `latest_universal` or `latest` names, or `source` itself; an empty
/// `tag` is the same as there. `source` may also have weights alone, as WeightFile reads them: their `tag` is "weights"
/// by default. Engine::load_checkpoint reads either form. Returns the new folder.
/// Errors: CheckpointError that names the file and what is wrong with it, or cannot be read.
DEEPTIDE_API std::string import_checkpoint(const std::string& source, const std::string& directory,
                                           const std::string& source_tag = "", const std::string& tag = "");

}  // namespace deeptide
