// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The smallest whole training program: `deeptide --num_ranks 2 build/examples/quickstart`, or alone for one rank.
#include <deeptide/deeptide.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  namespace nn = torch::nn;
  const auto config = deeptide::Config::from_text(R"({
    "train_batch_size": 64,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3}
  })");

  torch::manual_seed(0);
  const auto inputs = torch::randn({4096, 8});
  const auto labels = inputs.sin().sum(1, /*keepdim=*/true);
  nn::Sequential model(nn::Linear(8, 512), nn::ReLU(), nn::Linear(512, 512), nn::ReLU(), nn::Linear(512, 1));

  auto engine = deeptide::initialize(*model, config);
  const auto& world = engine.world();
  deeptide::DistributedSampler sampler(
      inputs.size(0), {.batch_size = engine.batch_sizes().micro, .rank = world.rank, .world_size = world.size});
  for (int epoch = 0; epoch < 10; ++epoch) {
    torch::Tensor loss;
    for (auto indices = sampler.next(); !indices.empty(); indices = sampler.next()) {
      const auto rows = torch::tensor(indices);
      loss = torch::mse_loss(model->forward(inputs.index_select(0, rows)), labels.index_select(0, rows));
      engine.backward(loss);
      engine.step();
    }
    if (world.rank == 0) std::cout << "epoch " << epoch << " loss " << loss.item<float>() << "\n";
  }
}
