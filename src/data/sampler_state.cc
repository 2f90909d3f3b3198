// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Positions of samplers in the state that checkpoints keep for programs.

#include "base/libraries/nlohmann.h"
#include "deeptide/data.h"

namespace deeptide {
namespace {

using nlohmann::ordered_json;

constexpr const char* kPrivate = "__deeptide__";  // as _engine/checkpoint.py names them
constexpr const char* kLoader = "loader";

ordered_json parse_object(const std::string& text) {
  ordered_json value = try_read_json<ordered_json>(text);
  if (!value.is_object()) {
    throw ConfigError("data sampler: the client state is '" + text.substr(0, 40) + "', expected a JSON object");
  }
  return value;
}

template <typename Number>
void check_same(const ordered_json& saved, const char* key, Number mine) {
  if (saved.at(key) == mine) return;
  throw ConfigError(std::string("data sampler: the checkpoint's position is for ") + key + " " +
                    write_json(saved[key]) + ", this sampler has " + std::to_string(mine) +
                    "; give the dataset and seed of the saved run, or leave its position out");
}

}  // namespace

std::string DistributedSampler::add_position(const std::string& client_state_json) const {
  ordered_json state = parse_object(client_state_json);
  state[kPrivate][kLoader] = {{"epoch", position_.epoch},
                              {"samples", position_.batch * options_.batch_size * options_.world_size},
                              {"num_samples", num_samples_},
                              {"seed", options_.seed}};
  return write_json(state);
}

bool DistributedSampler::take_position(const std::string& client_state_json) {
  const ordered_json state = parse_object(client_state_json);
  if (!state.contains(kPrivate) || !state[kPrivate].contains(kLoader)) return false;
  const ordered_json& saved = state[kPrivate][kLoader];
  try {
    check_same(saved, "num_samples", num_samples_);
    check_same(saved, "seed", options_.seed);
    set_position({.epoch = saved.at("epoch").get<int64_t>(),
                  .batch = saved.at("samples").get<int64_t>() / (options_.batch_size * options_.world_size)});
  } catch (const ordered_json::exception& error) {
    throw ConfigError(std::string("data sampler: the checkpoint's position cannot be read: ") + error.what());
  }
  return true;
}

}  // namespace deeptide
