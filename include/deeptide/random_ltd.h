// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Random-LTD: layers that see a random part of the tokens while they train.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "deeptide/curriculum.h"

// Shapes: B batch, S sequence, K tokens that are kept, D hidden, L layers.

namespace deeptide::ops {

/// Draws positions to keep, ascending, without repetition, by torch's generator of `device`: (L, B, K) int64.
DEEPTIDE_API at::Tensor sample_tokens(int64_t kept, int64_t length, int64_t batch, int64_t layers, at::Device device);
/// The kept tokens: (B, S, D) and (B, K) -> (B, K, D); without batch_first, (S, B, D) -> (K, B, D).
DEEPTIDE_API at::Tensor gather_tokens(const at::Tensor& activations, const at::Tensor& indices,
                                      bool batch_first = true);
/// `activations` with the kept tokens replaced by `part`, what a layer made of them; the others keep theirs.
DEEPTIDE_API at::Tensor scatter_tokens(const at::Tensor& activations, const at::Tensor& part, const at::Tensor& indices,
                                       bool batch_first = true);
/// The kept tokens of each row along `dim`: (B or 1, …, S, …) and (B, K) -> (B, …, K, …). For positions, say.
DEEPTIDE_API at::Tensor choose_tokens(const at::Tensor& whole, const at::Tensor& indices, int64_t dim);
/// The mask of the first `kept` tokens of `length`: a causal mask is that of any so many tokens in their order.
DEEPTIDE_API at::Tensor cut_mask(const at::Tensor& mask, int64_t kept, int64_t length);
/// The mask's rows and columns of the kept tokens: (B or 1, …, S or 1, S) and (B, K) -> (B, …, K or 1, K).
DEEPTIDE_API at::Tensor choose_mask(const at::Tensor& mask, const at::Tensor& indices, int64_t length);
/// Whichever of the two is right: a decoder's mask that all rows share, (S, S) or (1, …, S), is cut, others choose.
/// Errors: ValueError for a mask of another form.
DEEPTIDE_API at::Tensor mask_of_kept(const at::Tensor& mask, const at::Tensor& indices, int64_t length,
                                     bool is_encoder);

}  // namespace deeptide::ops

namespace deeptide {

struct RandomLtdOptions {
  std::vector<int64_t> layers;  // their numbers
  bool is_encoder = false;      // its mask is each token's own; a decoder's is causal
  bool batch_first = true;      // else hidden states are (S, B, D)
};

/// Layers that see a random part of their tokens while they train, by a schedule. Source: arXiv:2211.11586.
class DEEPTIDE_API RandomLtd {
 public:
  /// A layer's arguments. indices: (B, K), of its tokens; undefined where it sees all.
  struct Tokens {
    at::Tensor hidden, mask, indices;
  };
  using Layer = std::function<at::Tensor(const Tokens& tokens)>;

  RandomLtd(RandomLtdSchedule schedule, RandomLtdOptions options)
      : schedule_(std::move(schedule)), options_(std::move(options)) {}
  /// Reads "data_efficiency.data_routing.random_ltd". Errors: ConfigError if it is off, lacks a key, or names another
  /// number of layers than random_ltd_layer_num.
  static RandomLtd from_config(const Config& config, int64_t global_batch);

  /// Call schedule().update(engine.global_steps()) before each forward that trains.
  RandomLtdSchedule& schedule() { return schedule_; }
  /// Returns what layer `number` makes of a random part of `hidden`, and `hidden` for the other tokens; what it makes
  /// of all, in evaluation, where it is none of the layers, and once the schedule has reached the length.
  /// Errors: ValueError as mask_of_kept.
  at::Tensor run(int64_t number, const Layer& layer, const at::Tensor& hidden, bool is_training,
                 const std::optional<at::Tensor>& mask = {}) const;

 private:
  RandomLtdSchedule schedule_;
  RandomLtdOptions options_;
};

}  // namespace deeptide
