// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Costs of a pipeline's layers, by which it is cut: trained elements, and time and memory on a micro-batch.
#pragma once

#include <vector>

#include "deeptide/pipeline.h"

namespace deeptide::engine {

int64_t num_trained(const torch::nn::Module& module);
/// The layer is made to be looked at, without memory or values, and without a draw.
int64_t num_trained(const PipelineLayer& layer);

/// Bounds of parts of which the slowest is fastest (profile), or the largest smallest (memory), as rank 0 measures them
/// on `sample`, the first layer's input: it makes one layer after the other, and runs it. Collective.
/// Errors: ConfigError on all ranks, naming a layer that fails.
std::vector<int64_t> measured_bounds(const std::vector<PipelineLayer>& layers, const PipelineOptions& options,
                                     const World& world);

/// Each layer's forward and backward; the fastest of some runs. Units: s.
std::vector<double> seconds_of_layers(const std::vector<PipelineLayer>& layers, const Activations& sample);
/// Units: bytes. A tied layer's parameters count where they are first used; what two layers keep, with the first.
struct LayerBytes {
  std::vector<double> states;  // of parameters, and of gradients and Adam's states in fp32
  std::vector<double> kept;    // by backward, of a micro-batch
};
LayerBytes bytes_of_layers(const std::vector<PipelineLayer>& layers, const Activations& sample);

}  // namespace deeptide::engine
