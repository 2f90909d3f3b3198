// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The outcome of init_compression, shared by the schedule and the cleaning.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "compression/curvature.h"
#include "compression/layer.h"

namespace deeptide::compression {

/// Bits that fall in the optimizer's steps (MoQ): one after each period, which doubles then.
struct FallingBits {
  std::optional<double> change;  // of the share in each step, in a mixture
  bool is_verbose = false;
  int64_t steps = 0;
  double share_kept = 1.0;  // of weights as they are, in a mixture
};

/// Copies the layers that "layer_reduction" names from the teacher. Errors: ConfigError.
void reduce_layers(torch::nn::Module& student, torch::nn::Module* teacher, const Json& section);

}  // namespace deeptide::compression

struct __attribute__((visibility("hidden"))) deeptide::Compression::Impl {
  torch::nn::Module& model;
  std::vector<compression::Group> groups;
  std::vector<compression::Layer> layers;
  std::optional<compression::FallingBits> falling;  // absent: no layer's bits fall
  int64_t falling_offset = 0;
  std::unique_ptr<compression::Curvature> curvature;  // null: periods double, and no more
  int64_t steps = 0;

  /// Adds the groups' techniques. Errors: ConfigError for a module that two groups of a technique name.
  void prepare();
  /// Errors: ConfigError if the layer is none that was prepared.
  compression::Layer& layer_of(const torch::nn::Module& module, const std::string& name);
  std::vector<compression::Layer*> falling_layers();
  /// Whether the next step lowers bits.
  bool is_due();
  void advance_bits();
  void follow();
};
