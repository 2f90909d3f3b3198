// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The candidates for an elastic batch, and the choice among them.
#include "config/elasticity.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>

#include "base/json.h"

namespace deeptide::config {
namespace {

using Sizes = std::vector<int64_t>;

// Numbers with more divisors than any smaller one, or nearly so, as DeepSpeed lists them.
constexpr int64_t kHighlyComposite[] = {1,      2,      4,      6,      12,     24,     36,     48,    60,    120,
                                        180,    240,    360,    720,    840,    1260,   1680,   2520,  5040,  7560,
                                        10080,  15120,  20160,  25200,  27720,  45360,  50400,  55440, 83160, 110880,
                                        166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720};

struct Choice {
  int64_t train = 0;
  Sizes valid;
};

std::string listed(const Sizes& sizes) {
  constexpr size_t kShown = 40;
  std::string text;
  for (size_t i = 0; i < std::min(sizes.size(), kShown); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return sizes.size() > kShown ? text + ", … up to " + std::to_string(sizes.back()) : text;
}

[[noreturn]] void fail(const std::string& what) { throw ConfigError("elasticity." + what); }

void check(const ElasticityConfig& config) {
  if (!config.sizes_given)
    fail("max_train_batch_size, micro_batch_sizes: missing; give both, so that a batch can be chosen");
  if (config.micro_batch_sizes.empty()) fail("micro_batch_sizes: got none, expected at least one size");
  if (config.max_gpus < config.min_gpus) {
    fail("min_gpus: " + std::to_string(config.min_gpus) + " is greater than max_gpus " +
         std::to_string(config.max_gpus));
  }
  if (config.version != 0.1 && config.version != 0.2) {
    fail("version: got " + to_text(JsonValue(config.version)) + ", expected 0.1 or 0.2");
  }
  if (config.version == 0.1 && config.model_parallel_size > 1) {
    fail("model_parallel_size: got " + std::to_string(config.model_parallel_size) +
         ", but version 0.1 has no model parallelism; set version to 0.2");
  }
  if (config.num_gpus_per_node % config.model_parallel_size != 0) {
    fail("num_gpus_per_node: " + std::to_string(config.num_gpus_per_node) +
         " is not divisible by model_parallel_size " + std::to_string(config.model_parallel_size));
  }
}

/// The least common multiple, or some number above `limit` if it exceeds that.
int64_t common_multiple(const Sizes& sizes, int64_t limit) {
  int64_t multiple = 1;
  for (const int64_t size : sizes) {
    const int64_t factor = size / std::gcd(multiple, size);
    if (multiple > limit / factor) return limit + 1;
    multiple *= factor;
  }
  return multiple;
}

/// Each micro-batch size, and their common multiple, times the largest highly composite number that fits.
std::set<int64_t> candidates(const Sizes& micro_batches, int64_t max_batch) {
  Sizes bases = micro_batches;
  bases.push_back(common_multiple(micro_batches, max_batch));
  std::set<int64_t> found;
  for (const int64_t base : bases) {
    if (base > max_batch) continue;
    const auto* above = std::upper_bound(std::begin(kHighlyComposite), std::end(kHighlyComposite), max_batch / base);
    found.insert(base * above[-1]);
  }
  return found;
}

/// The numbers of ranks in [low, high] that divide `batch` into whole micro-batches of some size.
Sizes valid_worlds(int64_t batch, const Sizes& micro_batches, int64_t low, int64_t high) {
  std::set<int64_t> found;
  for (const int64_t micro : micro_batches) {
    if (batch % micro != 0) continue;
    const int64_t shares = batch / micro;
    for (int64_t divisor = 1; divisor * divisor <= shares; ++divisor) {
      if (shares % divisor != 0) continue;
      for (const int64_t world : {divisor, shares / divisor}) {
        if (world >= low && world <= high) found.insert(world);
      }
    }
  }
  return {found.begin(), found.end()};
}

/// Chooses as version 0.1 does, over ranks; version 0.2 calls it over nodes. A limit of 0 means no limit.
Choice choose(const ElasticityConfig& config, int64_t max_batch, int64_t min_worlds, int64_t max_worlds) {
  const Sizes& micro_batches = config.micro_batch_sizes;
  const auto [smallest, largest] = std::minmax_element(micro_batches.begin(), micro_batches.end());
  if (*largest > max_batch) {
    fail("micro_batch_sizes: " + std::to_string(*largest) + " is greater than the largest batch, " +
         std::to_string(max_batch) + " (max_train_batch_size per rank of a node)");
  }
  const int64_t low = std::max<int64_t>(min_worlds, 1);
  const int64_t high = max_worlds > 0 ? max_worlds : max_batch / *smallest;
  Choice best;
  best.train = *smallest;
  for (const int64_t batch : candidates(micro_batches, max_batch)) {
    Sizes valid = valid_worlds(batch, micro_batches, low, high);
    const bool preferred = config.prefer_larger_batch ? batch > best.train : batch < best.train;
    if (valid.size() > best.valid.size() || (valid.size() == best.valid.size() && preferred)) {
      best = {batch, std::move(valid)};
    }
  }
  return best;
}

/// Chooses as version 0.2 does: of the sizes that divide the `share` of a rank, the first, or the largest if preferred.
int64_t preferred_micro(const ElasticityConfig& config, int64_t share) {
  int64_t found = 0;
  for (const int64_t micro : config.micro_batch_sizes) {
    if (share % micro != 0) continue;
    if (found == 0 || (config.prefer_larger_batch && micro > found)) found = micro;
  }
  return found;
}

/// A number of ranks that no whole number of nodes gives: the largest (or smallest) batch for it alone.
/// Ranks over nodes are kept as the fraction `scaled` / num_gpus_per_node.
ElasticBatch for_this_world(const ElasticityConfig& config, int64_t world_size, int64_t ranks_per_node) {
  const int64_t nodes = config.num_gpus_per_node;
  const int64_t scaled = world_size * ranks_per_node;
  Sizes batches;  // times num_gpus_per_node
  for (const int64_t micro : config.micro_batch_sizes) {
    batches.push_back(config.max_train_batch_size * nodes / (micro * scaled) * micro * scaled);
  }
  const int64_t batch = config.prefer_larger_batch ? *std::max_element(batches.begin(), batches.end())
                                                   : *std::min_element(batches.begin(), batches.end());
  if (batch == 0) {  // DeepSpeed continues with a batch of 0
    fail("max_train_batch_size: " + std::to_string(config.max_train_batch_size) + " is too small for " +
         std::to_string(world_size) + " ranks with the micro-batches given");
  }
  return {batch / nodes, {scaled / nodes}, 0, preferred_micro(config, batch / (nodes * world_size))};
}

ElasticBatch by_nodes(const ElasticityConfig& config, int64_t world_size) {
  const int64_t per_node = config.num_gpus_per_node / config.model_parallel_size;
  const Choice choice = choose(config, config.max_train_batch_size / per_node,
                               config.min_gpus / config.num_gpus_per_node, config.max_gpus / config.num_gpus_per_node);
  ElasticBatch batch{choice.train * per_node, choice.valid, 0, 0};
  for (int64_t& world : batch.valid_worlds) world *= per_node;
  if (!std::binary_search(batch.valid_worlds.begin(), batch.valid_worlds.end(),
                          world_size / config.model_parallel_size)) {
    return for_this_world(config, world_size, per_node);
  }
  batch.preferred_micro = preferred_micro(config, batch.train / world_size);
  return batch;
}

int64_t largest_micro(const ElasticityConfig& config, int64_t share) {
  int64_t largest = 0;
  for (const int64_t micro : config.micro_batch_sizes) {
    if (share % micro == 0) largest = std::max(largest, micro);
  }
  return largest;
}

}  // namespace

ElasticBatch elastic_batch_unchecked(const ElasticityConfig& config, int64_t world_size) {
  check(config);
  ElasticBatch batch;
  if (config.version == 0.1) {
    Choice choice = choose(config, config.max_train_batch_size, config.min_gpus, config.max_gpus);
    if (choice.valid.empty()) {
      fail("min_gpus, max_gpus: no batch up to " + std::to_string(config.max_train_batch_size) +
           " suits any number of ranks from " + std::to_string(config.min_gpus) + " to " +
           std::to_string(config.max_gpus));
    }
    batch = {choice.train, std::move(choice.valid), 0, 0};
  } else {
    if (world_size < 1) fail("version: 0.2 needs the number of ranks; give a world size or set WORLD_SIZE");
    batch = by_nodes(config, world_size);
  }
  if (world_size > 0 && std::binary_search(batch.valid_worlds.begin(), batch.valid_worlds.end(), world_size)) {
    batch.micro = largest_micro(config, batch.train / world_size);
  }
  return batch;
}

ElasticBatch elastic_batch(const ElasticityConfig& config, int64_t world_size) {
  ElasticBatch batch = elastic_batch_unchecked(config, world_size);
  if (world_size > 0 && batch.micro == 0) {
    throw IncompatibleWorldSize("elasticity: World size (" + std::to_string(world_size) +
                                ") is not valid for a global batch of " + std::to_string(batch.train) +
                                "; use one of: " + listed(batch.valid_worlds));
  }
  return batch;
}

void check_scheduler_contract(const ElasticityConfig& config, const char* text) {
  if (text == nullptr || *text == '\0') return;
  static const double default_version = Config().elasticity().version;
  const std::string name = "DEEPSPEED_ELASTICITY_CONFIG";
  const JsonValue planned = parse_json(text, name);
  JsonValue micro_batches;
  micro_batches.kind = JsonKind::array;
  for (const int64_t size : config.micro_batch_sizes) micro_batches.items.emplace_back(size);
  const std::pair<const char*, JsonValue> agreed[] = {
      {"max_train_batch_size", JsonValue(config.max_train_batch_size)},
      {"micro_batch_sizes", micro_batches},
      {"version", JsonValue(config.version)},
  };
  for (const auto& [key, value] : agreed) {
    const JsonMember* member = planned.find(key);
    const JsonValue seen = member ? member->value : JsonValue();
    if (member && same_content(seen, value)) continue;
    // An absent version means the default, as in the section itself.
    if (!member && std::string_view(key) == "version" && config.version == default_version) continue;
    fail(std::string(key) + ": " + to_text(value) + " does not match " + to_text(seen) + " in " + name +
         ", with which the scheduler planned; use the same section for both");
  }
}

}  // namespace deeptide::config
