// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// BERT's layer with fused query, key and value, and activations that backward computes again: DeepSpeed's.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>

#include "deeptide/export.h"

namespace deeptide {

enum class GeluForm : uint8_t { tanh, exact };

/// The settings of a layer. Three trade time for memory: `normalize_invertible` keeps a norm's output and not its
/// input, so that a norm's weight must not be 0; `gelu_checkpoint` computes the GELU again in backward,
/// `attn_dropout_checkpoint` the dropout of attention.
struct TransformerLayerOptions {
  int64_t hidden_size = 0;
  int64_t heads = 0;
  int64_t intermediate_size = 0;  // 0: 4 * hidden_size
  double attn_dropout_ratio = 0.0;
  double hidden_dropout_ratio = 0.0;
  int64_t num_hidden_layers = 1;  // of the whole model
  double initializer_range = 0.02;
  bool adjust_init_range = true;  // weights before a residual sum deviate by the range / sqrt(2 num_hidden_layers)
  double layer_norm_eps = 1e-12;
  bool pre_layer_norm = true;  // norms before attention and MLP, else after
  bool normalize_invertible = false;
  bool gelu_checkpoint = false;
  bool attn_dropout_checkpoint = false;
  GeluForm gelu = GeluForm::tanh;
};

/// Errors: ConfigError naming the field.
DEEPTIDE_API void check(const TransformerLayerOptions& options);

/// One layer. Parameters are named as DeepSpeed names them.
/// Shapes: (B, S, D) and a mask that is added to scores, (B or 1, 1 or H, 1 or S, S) -> (B, S, D).
/// Errors: ConfigError as check(). Source: DeepSpeed's DeepSpeedTransformerLayer; Devlin et al., arXiv:1810.04805.
class DEEPTIDE_API TransformerLayerImpl : public torch::nn::Cloneable<TransformerLayerImpl> {
 public:
  explicit TransformerLayerImpl(const TransformerLayerOptions& options);
  void reset() override;
  /// Draws the weights anew.
  void reset_parameters();
  at::Tensor forward(const at::Tensor& hidden_states, const std::optional<at::Tensor>& attention_mask = {});

  TransformerLayerOptions options;
  at::Tensor attn_qkvw, attn_qkvb, attn_ow, attn_ob, attn_nw, attn_nb;
  at::Tensor inter_w, inter_b, output_w, output_b, norm_w, norm_b;
};
TORCH_MODULE(TransformerLayer);

}  // namespace deeptide
