// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Models whose layers are compressed train alike however they are sharded, and go on exactly where a checkpoint was.
#include "deeptide/compression.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "engine/models.h"
#include "errors.h"
#include "ranks.h"

namespace deeptide::compressed_training {
namespace {

using at::Tensor;

constexpr const char* kSection = R"({"compression_training": {
  "weight_quantization": {"shared_parameters": {"enabled": true, "schedule_offset": 1, "quantize_groups": 4,
      "rounding": "stochastic"}, "different_groups": {"all": {"params": {"start_bits": 8, "target_bits": 4,
      "quantization_period": 2}, "modules": ["up", "embed"]}}},
  "activation_quantization": {"shared_parameters": {"enabled": true, "schedule_offset": 2},
      "different_groups": {"all": {"params": {"bits": 8}, "modules": ["down"]}}},
  "row_pruning": {"shared_parameters": {"enabled": true, "schedule_offset": 0},
      "different_groups": {"all": {"params": {"dense_ratio": 0.5}, "modules": ["up"]}}},
  "sparse_pruning": {"shared_parameters": {"enabled": true, "schedule_offset": 1, "method": "topk"},
      "different_groups": {"all": {"params": {"dense_ratio": 0.6}, "modules": ["down"]}}}}})";

struct SmallImpl : torch::nn::Module {
  SmallImpl() : embed(kVocabulary, kWidth), up(kWidth, 2 * kWidth), down(2 * kWidth, kVocabulary) {
    register_module("embed", embed);
    register_module("up", up);
    register_module("down", down);
  }
  Tensor forward(const Tensor& tokens, const Tensor& targets) {
    return torch::nn::functional::cross_entropy(down(torch::relu(up(embed(tokens)))), targets);
  }
  torch::nn::Embedding embed;
  torch::nn::Linear up;
  CompressedLinear down;
};
TORCH_MODULE(Small);

struct Session {
  /// by_hand: the program moves the schedule, and saves and loads its place.
  Session(const World& world, int stage, bool by_hand, const std::string& more = "{}")
      : world(world),
        by_hand(by_hand),
        config(config_of(stage, 2, 1, false, Ranks::apart).with(kSection).with(more)),
        model(make_seeded([] { return Small(); })) {
    make_seeded([&] {
      compression = init_compression(*model, config);
      return 0;
    });
    engine.emplace(engine_of(*model, world, config));
    if (by_hand) {
      compression->share_masks([this](const Tensor& mask, int source) { engine->broadcast(mask, source); });
    } else {
      compression->follow(*engine);
    }
  }

  double step(int64_t number, double factor = 1.0) {
    const auto [tokens, targets] = batch_of(number, 2 * world.size);
    compression->before_forward();
    const Tensor loss = model(tokens.narrow(0, 2 * world.rank, 2), targets.narrow(0, 2 * world.rank, 2));
    engine->backward(loss * factor);
    outcome = engine->step();
    if (outcome.applied() && by_hand) compression->step();
    return loss.item<double>();
  }

  void save(const std::string& folder) {
    engine->save_checkpoint(folder, "", by_hand ? compression->add_state("{}") : "{}");
  }
  void load(const std::string& folder) {
    const auto loaded = engine->load_checkpoint(folder);
    ASSERT_TRUE(loaded);
    if (by_hand) {
      ASSERT_TRUE(compression->take_state(loaded->client_state_json));
    }
  }

  World world;
  bool by_hand;
  Config config;
  Small model;
  std::shared_ptr<Compression> compression;
  std::optional<Engine> engine;
  StepOutcome outcome;
};

struct Results {
  std::vector<double> losses;
  std::vector<Tensor> weights;
};

void expect_equal(const Results& found, const Results& wanted) {
  EXPECT_EQ(found.losses, wanted.losses);
  ASSERT_EQ(found.weights.size(), 7);
  ASSERT_EQ(wanted.weights.size(), 7);
  for (size_t i = 0; i < wanted.weights.size(); ++i) EXPECT_TRUE(found.weights[i].equal(wanted.weights[i])) << i;
}

Results trained(int stage, int64_t from, const std::string& folder, bool by_hand) {
  Results results;
  run_ranks(2, [&](const World& world) {
    Session session(world, stage, by_hand);
    if (from > 0) session.load(folder);
    for (int64_t number = from; number < 7; ++number) {
      const double loss = session.step(number);
      if (world.rank == 0) results.losses.push_back(loss);
      if (number == 3 && from == 0) session.save(folder);
    }
    for (const auto& item : session.engine->module_state_dict(0)) results.weights.push_back(item.tensor);
  });
  return results;
}

/// A checkpoint of either goes on in the other: the place of the schedule is the same.
TEST(Compression, TrainsAlikeWhereItIsShardedAndWhoeverMovesItAndGoesOnWhereItWas) {
  const auto folder = std::filesystem::temp_directory_path() / ("deeptide_compression_" + std::to_string(::getpid()));
  std::optional<Results> whole;
  for (const auto& [stage, by_hand] : {std::pair(0, true), std::pair(0, false), std::pair(3, false)}) {
    SCOPED_TRACE(std::to_string(stage) + (by_hand ? " by hand" : ""));
    const std::string saved = folder / (std::to_string(stage) + std::to_string(by_hand));
    const Results straight = trained(stage, 0, saved, by_hand);
    if (!whole) {
      whole = straight;
      EXPECT_NE(straight.losses.front(), straight.losses.back());
    }
    expect_equal(straight, *whole);
    for (const bool resumed_by_hand : {true, false}) {
      Results resumed = trained(stage, 4, saved, resumed_by_hand);
      resumed.losses.insert(resumed.losses.begin(), whole->losses.begin(), whole->losses.begin() + 4);
      expect_equal(resumed, *whole);
    }
  }
  std::filesystem::remove_all(folder);
}

TEST(Compression, GoesBackWithARewind) {
  const std::string policy = R"({"deeptide": {"on_skipped": "rewind", "skipped_limit": 1, "rewind_interval": 2}})";
  run_ranks(2, [&](const World& world) {
    Session returning(world, 1, false, policy), straight(world, 1, false);
    for (int64_t number = 0; number < 3; ++number) EXPECT_EQ(returning.step(number), straight.step(number));
    EXPECT_TRUE(returning.outcome.kept);
    const auto after = returning.compression->add_state("{}");
    returning.step(0, std::numeric_limits<double>::quiet_NaN());
    EXPECT_EQ(returning.outcome.rewound_to, 2);
    EXPECT_NE(returning.compression->add_state("{}"), after);
    returning.step(2);
    EXPECT_EQ(returning.compression->add_state("{}"), after);
    for (int64_t number = 3; number < 6; ++number) EXPECT_EQ(returning.step(number), straight.step(number));
  });
}

TEST(Compression, IsKeptByARebuiltEngine) {
  run_ranks(2, [](const World& world) {
    Session kept(world, 1, false), other(world, 1, false);
    for (int64_t number = 0; number < 4; ++number) {
      EXPECT_EQ(kept.step(number), other.step(number));
      if (number == 1) kept.engine->rebuild(describe(*kept.model));
    }
    EXPECT_EQ(kept.compression->add_state("{}"), other.compression->add_state("{}"));
  });
}

constexpr const char* kCurved = R"({"quantize_training": {"enabled": true,
  "quantize_bits": {"start_bits": 8, "target_bits": 3},
  "quantize_schedule": {"quantize_period": 2, "schedule_offset": 0}, "quantize_groups": 2,
  "eigenvalue": {"enabled": true, "layer_name": "h", "layer_num": 3, "max_iter": 30}}})";

struct CurvedImpl : torch::nn::Module {
  CurvedImpl() : embed(kVocabulary, kWidth), head(kWidth, kVocabulary) {
    register_module("embed", embed);
    for (int number = 0; number < 3; ++number) h->push_back(torch::nn::Linear(kWidth, kWidth));
    register_module("h", h);
    register_module("head", head);
  }
  Tensor forward(const Tensor& tokens, const Tensor& targets) {
    Tensor x = embed(tokens);
    for (const auto& block : *h) x = torch::tanh(block->as<torch::nn::Linear>()->forward(x));
    return torch::nn::functional::cross_entropy(head(x), targets);
  }
  torch::nn::Embedding embed;
  torch::nn::ModuleList h;
  torch::nn::Linear head;
};
TORCH_MODULE(Curved);

/// [bits, period, share kept] of each layer after two steps, per rank.
std::vector<std::string> curved_layers(int stage) {
  std::vector<std::string> layers(2);
  run_ranks(2, [&](const World& world) {
    const Config config = config_of(stage, 2, 1, false, Ranks::apart).with(kCurved);
    Curved model = make_seeded([] { return Curved(); });
    const auto compression = init_compression(*model, config);
    Engine engine = engine_of(*model, world, config);
    compression->follow(engine);
    for (int64_t number = 0; number < 2; ++number) {
      const auto [tokens, targets] = batch_of(number, 4);
      compression->before_forward();
      engine.backward(model(tokens.narrow(0, 2 * world.rank, 2), targets.narrow(0, 2 * world.rank, 2)));
      engine.step();
    }
    layers[static_cast<size_t>(world.rank)] = compression->add_state("{}");
  });
  return layers;
}

/// The period of two steps: doubled, times 1 + floor(4 * share), 5 for the most curved block.
TEST(Compression, CurvedBlocksKeepTheirBitsLongerAndRanksAgree) {
  std::string first;
  for (const int stage : {0, 3}) {
    const auto ranks = curved_layers(stage);
    EXPECT_EQ(ranks[0], ranks[1]);
    if (first.empty()) first = ranks[0];
    EXPECT_EQ(ranks[0], first) << "stage " << stage;
  }
  const auto found = first.find("[[7,4,"), most = first.find("[7,20,");
  EXPECT_NE(found, first.npos) << "the embedding is in no block: " << first;
  EXPECT_NE(most, first.npos) << first;
  EXPECT_NE(first.find("[7,4,0.0]]"), first.npos) << "nor is the head: " << first;
}

TEST(Compression, IsOneForAnEngine) {
  run_ranks(1, [](const World& world) {
    Session one(world, 0, false), other(world, 0, true);
    one.compression->follow(*one.engine);
    EXPECT_NE(error_of([&] { other.compression->follow(*one.engine); }).find("keeps another model's schedule"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace deeptide::compressed_training
