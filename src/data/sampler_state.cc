// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Positions of samplers in the state that checkpoints keep for programs.

#include "data/private_state.h"
#include "deeptide/data.h"

namespace deeptide {
namespace {

using data::Json;

template <typename Number>
void check_same(const Json& saved, const char* key, Number mine) {
  if (saved.at(key) == mine) return;
  throw ConfigError(std::string("data sampler: the checkpoint's position is for ") + key + " " +
                    write_json(saved[key]) + ", this sampler has " + std::to_string(mine) +
                    "; give the dataset and seed of the saved run, or leave its position out");
}

}  // namespace

std::string DistributedSampler::add_position(const std::string& client_state_json) const {
  return data::add_private(client_state_json, "loader",
                           {{"epoch", position_.epoch},
                            {"samples", position_.batch * options_.batch_size * options_.world_size},
                            {"num_samples", num_samples_},
                            {"seed", options_.seed}});
}

bool DistributedSampler::take_position(const std::string& client_state_json) {
  return data::take_private(client_state_json, "loader", [this](const Json& saved) {
    check_same(saved, "num_samples", num_samples_);
    check_same(saved, "seed", options_.seed);
    set_position({.epoch = saved.at("epoch").get<int64_t>(),
                  .batch = saved.at("samples").get<int64_t>() / (options_.batch_size * options_.world_size)});
  });
}

}  // namespace deeptide
