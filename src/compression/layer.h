// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A layer of a model, whose techniques compute its weight from its parameters.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "compression/section.h"
#include "compression/techniques.h"
#include "deeptide/compression.h"

namespace deeptide::compression {

/// A layer as its program calls it: forward reads the members `weight` and `bias`.
class Layer {
 public:
  Layer(std::string name, std::shared_ptr<torch::nn::Module> module);

  const std::string& name() const { return name_; }
  torch::nn::Module& module() const { return *module_; }
  at::Tensor parameter(const char* key) const;  // undefined without one
  /// Puts the weight and the bias of now into the members.
  void compress() const;
  /// Puts the parameters there, as they were before any technique.
  void restore() const;
  /// Removes outputs, inputs or features that the mask lacks. Errors: ConfigError for a grouped convolution.
  void keep_outputs(const at::Tensor& mask) const;
  void keep_inputs(const at::Tensor& mask) const;
  /// Gives a parameter these values, of any shape.
  void set(const char* key, const at::Tensor& values) const;

  std::optional<WeightQuantization> weights;
  std::shared_ptr<InputQuantization> input;
  std::vector<Pruning> pruning;

 private:
  void keep_features(const at::Tensor& mask) const;

  std::string name_;
  std::shared_ptr<torch::nn::Module> module_;
  at::Tensor* weight_ = nullptr;  // members of the module
  at::Tensor* bias_ = nullptr;
};

/// Whether the technique is one for this kind of layer.
bool can_take(const torch::nn::Module& module, const std::string& technique);
/// Modules that `group` can change in whose names the regular expression is found; "*" is all of them. is_related:
/// those that may follow. Errors: ConfigError where there is none.
std::vector<Layer> matching(torch::nn::Module& model, const Group& group, const std::string& pattern,
                            bool is_related = false);
/// Takes a mask away, which torch's modules cannot.
void erase_buffer(torch::nn::Module& module, const std::string& name);
void erase_parameter(torch::nn::Module& module, const std::string& name);

}  // namespace deeptide::compression
