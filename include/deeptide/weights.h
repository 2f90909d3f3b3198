// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Weights that others saved: safetensors files and folders, as Transformers writes them.
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

/// The tensors of a safetensors file, or of a folder that has `model.safetensors` or several files beside a
/// `model.safetensors.index.json`. Files are mapped: bytes are read where they are used, and the kernel may drop them
/// again. Thread-safe.
class DEEPTIDE_API WeightFile {
 public:
  /// Errors: CheckpointError that names the file and what is wrong with it.
  explicit WeightFile(const std::string& path);
  ~WeightFile();
  WeightFile(WeightFile&&) noexcept;
  WeightFile& operator=(WeightFile&&) noexcept;

  /// In the order of their names.
  std::vector<std::string> names() const;
  bool has(const std::string& name) const;
  /// Returns a view of the file, which outlives this object. What is written to it stays in this process.
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

/// Copies tensors into parameters and buffers of `model` of equal names, cast to their types. A parameter that is tied
/// to a loaded one is not missing. Before the Engine exists; under zero::Init nothing is read until the Engine binds
/// the parameters, unit by unit. Ranks of a host read the same pages.
/// Errors: CheckpointError on other shapes, with nothing copied; with `strict`, also on missing and unexpected names.
DEEPTIDE_API LoadedWeights load_weights(torch::nn::Module& model, const std::string& path, bool strict = true);

}  // namespace deeptide
