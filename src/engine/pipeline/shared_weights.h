// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Weights of one module on several stages: the first one owns and trains them, the others borrow them for a step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "engine/pipeline/letters.h"

namespace deeptide::engine {

/// This stage's part of them. So each is sharded, stepped, clipped and saved once, at every stage of ZeRO.
class SharedWeights {
 public:
  explicit SharedWeights(const PipelineModule& model);

  /// How many letters come of which stage in one step.
  std::map<int, int64_t> letters(bool training) const;
  /// Before the first forward: owners send, the others take.
  void exchange_values(Letters& letters, int64_t step);
  /// After each backward. Sums are in fp32 at least, as the engine's are.
  void add_gradients();
  /// After the last backward, and what it sends.
  void send_gradients(Letters& letters, int64_t step);
  /// In an owner's last backward: its parameters, and what the borrowers' gradients add to theirs, in fp32 at least.
  std::pair<Activations, Activations> take_gradients(Letters& letters, int64_t step) const;

 private:
  struct Weight {
    int64_t number = 0;  // alike on all stages
    at::Tensor parameter;
    std::vector<int> borrowers;  // if this stage owns it
    int owner = 0;               // if not
    at::Tensor sum = {};         // of gradients, over micro-batches, if not
  };
  std::vector<Weight> owned_, borrowed_;
};

}  // namespace deeptide::engine
