// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A rank that trains the tiny model and keeps all that its program sees, to be compared bit for bit.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "engine/models.h"

namespace deeptide {

struct TrainingSession {
  static constexpr int64_t kMicro = 2;

  TrainingSession(const World& w, int64_t gas, const Config& config)
      : world(w), accumulation(gas), engine(engine_of(*model, w, config)) {}
  at::Tensor loss(int64_t step, int64_t micro = 0) {
    const auto [tokens, targets] = batch_of(step, kMicro * accumulation * world.size);
    const int64_t first = (micro * world.size + world.rank) * kMicro;
    return model(tokens.narrow(0, first, kMicro), targets.narrow(0, first, kMicro));
  }
  StepOutcome step(int64_t number) {
    StepOutcome outcome;
    for (int64_t micro = 0; micro < accumulation; ++micro) {
      const at::Tensor now = loss(number, micro);
      seen.push_back(now.detach());
      engine.backward(now);
      outcome = engine.step();
    }
    seen.push_back(torch::tensor(outcome.grad_norm));
    return outcome;
  }
  /// The program's view, and the weights.
  std::vector<at::Tensor> results() {
    for (const auto& item : model->named_parameters()) {
      seen.push_back(item.value().detach().clone());
      seen.push_back(engine.full_state(item.key(), "master"));
    }
    return seen;
  }

  TinyModel model = make_tiny();
  World world;
  int64_t accumulation;
  Engine engine;
  std::vector<at::Tensor> seen;
};

inline void expect_equal_results(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(torch::equal(found[i], wanted[i])) << "result " << i;
}

}  // namespace deeptide
