// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Resumes from a checkpoint bit for bit and refuses one that does not fit, with a model of bare tensors.
#include "deeptide/checkpoint.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "deeptide/engine.h"
#include "ranks.h"

namespace deeptide::checkpoint_test {
namespace {

using at::Tensor;

/// Parameters of odd sizes, a tied one, a frozen one, a buffer.
struct BareModel {
  explicit BareModel(float start = 0.0f, int64_t columns = 7) {
    const auto parameter = [&](int64_t rows) {
      return (at::arange(rows * columns, at::kFloat).view({rows, columns}) / 50 + start).set_requires_grad(true);
    };
    const Tensor first = parameter(9), second = parameter(3);
    const Tensor frozen = at::full({5}, 2.0f + start);
    counter = at::zeros({1}, at::kLong);
    description.parameters = {{"first", first}, {"second", second}, {"frozen", frozen}, {"tied", first}};
    description.buffers = {{"counter", counter}};
    description.modules = {{"", "Bare"}};
  }
  Tensor loss(int step, int rank) const {
    const auto& p = description.parameters;
    counter.add_(1);
    const float target = 0.1f * static_cast<float>(step + rank);
    return (p[0].tensor - target).square().mean() + (p[1].tensor * p[2].tensor.sum() + target).square().mean();
  }
  ModelDescription description;
  mutable Tensor counter;
};

/// Ranks that share memory take one path at every stage; ranks apart take each stage's own.
Config config_of(int stage, bool bf16, bool shared) {
  return Config::from_text(
      R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
                               "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}},
                               "zero_optimization": {"stage": )" +
      std::to_string(stage) + R"(, "stage3_param_persistence_threshold": 0}, "bf16": {"enabled": )" +
      (bf16 ? "true" : "false") + R"(}, "deeptide": {"comm_timeout": 60, "shared_memory": )" +
      (shared ? "true" : "false") + "}}");
}

struct Session {
  Session(const World& w, int stage, bool bf16 = false, float start = 0.0f, int64_t columns = 7, bool shared = true)
      : world(w), model(start, columns), engine(model.description, config_of(stage, bf16, shared), options(w)) {}
  static InitOptions options(const World& w) {
    InitOptions options;
    options.world = w;
    return options;
  }
  void train(int first, int count) {
    for (int step = first; step < first + count; ++step) {
      engine.backward(model.loss(step, world.rank));
      ASSERT_TRUE(engine.step().applied());
    }
  }
  std::map<std::string, Tensor> state() {
    std::map<std::string, Tensor> all;
    for (const auto& [name, tensor] : engine.module_state_dict()) all[name] = tensor;
    for (const char* name : {"first", "second"}) {
      for (const char* role : {"master", "exp_avg", "exp_avg_sq"})
        all[std::string(name) + "/" + role] = engine.full_state(name, role);
    }
    return all;
  }
  World world;
  BareModel model;
  Engine engine;
};

void expect_same_bits(const std::map<std::string, Tensor>& one, const std::map<std::string, Tensor>& other) {
  ASSERT_EQ(one.size(), other.size());
  for (const auto& [name, tensor] : one) EXPECT_TRUE(at::equal(tensor, other.at(name))) << name;
}

/// A folder that goes with the test.
struct Folder {
  Folder()
      : path(std::filesystem::path(testing::TempDir()) /
             ("deeptide_engine_" + std::to_string(::getpid()) + "_" + std::to_string(next()++))) {}
  ~Folder() { std::filesystem::remove_all(path); }
  static int& next() {
    static int number = 0;
    return number;
  }
  std::filesystem::path path;
};

class Checkpoints : public testing::TestWithParam<std::tuple<int, int, bool, bool>> {};

TEST_P(Checkpoints, GoOnBitForBit) {
  const auto [size, stage, bf16, shared] = GetParam();
  const Folder folder;
  run_ranks(size, [&, stage = stage, bf16 = bf16, shared = shared](const World& world) {
    Session straight(world, stage, bf16, 0.0f, 7, shared);
    straight.train(0, 3);
    const std::string path = straight.engine.save_checkpoint(folder.path, "", R"({"epoch": 4})");
    EXPECT_EQ(path, (folder.path / "global_step3").string());
    straight.train(3, 3);

    Session resumed(world, stage, bf16, /*start=*/5.0f, 7, shared);
    const auto loaded = resumed.engine.load_checkpoint(folder.path);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->path, path);
    EXPECT_EQ(loaded->client_state_json, R"({"epoch": 4})");
    EXPECT_EQ(resumed.engine.global_steps(), 3);
    EXPECT_EQ(resumed.model.counter.item<int64_t>(), 3);
    resumed.train(3, 3);
    expect_same_bits(resumed.state(), straight.state());
    EXPECT_EQ(resumed.engine.hyperparameters(0).lr(), straight.engine.hyperparameters(0).lr());
  });
}

INSTANTIATE_TEST_SUITE_P(Settings, Checkpoints,
                         testing::Combine(testing::Values(1, 2, 3), testing::Values(0, 1, 3), testing::Bool(),
                                          testing::Bool()));

TEST(Checkpoint, FitsAnotherStageAndAnotherWorld) {
  for (const bool shared : {true, false}) {
    const Folder folder;
    std::map<std::string, Tensor> saved;
    run_ranks(3, [&](const World& world) {
      Session session(world, 3, false, 0.0f, 7, shared);
      session.train(0, 2);
      session.engine.save_checkpoint(folder.path, "here");
      const auto state = session.state();
      if (world.rank == 0) saved = state;
    });
    for (const auto& [size, stage] : {std::pair{2, 3}, {1, 0}, {4, 1}}) {
      run_ranks(size, [&, stage = stage](const World& world) {
        Session session(world, stage, false, 1.0f, 7, !shared);
        ASSERT_TRUE(session.engine.load_checkpoint(folder.path, "here"));
        expect_same_bits(session.state(), saved);
      });
    }
  }
}

std::set<std::string> keys_in(const std::string& folder) {
  std::set<std::string> keys;
  const CheckpointReader reader(folder);
  for (const CheckpointTensor& tensor : reader.tensors()) {
    if (tensor.role.find("buffer") != 0) keys.insert(tensor.name + "/" + tensor.role);
  }
  return keys;
}

TEST(Checkpoint, HoldsWhatItsContentsSay) {
  const Folder folder;
  run_ranks(2, [&](const World& world) {
    Session session(world, 2);
    session.train(0, 2);
    for (const auto& [tag, contents] : {std::pair{"all", SaveContents::all},
                                        {"trainable", SaveContents::trainable},
                                        {"weights", SaveContents::weights}}) {
      session.engine.save_checkpoint(folder.path, tag, "{}", {.contents = contents});
    }
    Session whole(world, 3, false, 4.0f), trained(world, 1, false, 4.0f), weights(world, 0, false, 4.0f);
    const auto untouched = weights.state();
    whole.engine.load_checkpoint(folder.path, "all");
    expect_same_bits(whole.state(), session.state());
    trained.engine.load_checkpoint(folder.path, "trainable");
    auto expected = session.state();
    expected["frozen"] = untouched.at("frozen");
    expect_same_bits(trained.state(), expected);
    EXPECT_THROW(weights.engine.load_checkpoint(folder.path, "weights"), CheckpointError);
    expect_same_bits(weights.state(), untouched);
    weights.engine.load_checkpoint(folder.path, "weights", {.optimizer_states = false});
    expected = session.state();
    for (auto& [name, tensor] : expected) {
      if (name.find("/exp_avg") != name.npos) tensor = untouched.at(name);
    }
    expect_same_bits(weights.state(), expected);
  });
  std::set<std::string> all = {"frozen/param"};
  for (const char* name : {"first", "second"}) {
    for (const char* role : {"master", "exp_avg", "exp_avg_sq"}) all.insert(std::string(name) + "/" + role);
  }
  EXPECT_EQ(keys_in(folder.path / "all"), all);
  all.erase("frozen/param");
  EXPECT_EQ(keys_in(folder.path / "trainable"), all);
  EXPECT_EQ(keys_in(folder.path / "weights"), (std::set<std::string>{"first/master", "second/master", "frozen/param"}));
}

std::string read_file(const std::filesystem::path& path) {
  std::stringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

/// Rewrites a saved checkpoint in the form of version 1: ranges, ranks instead of coordinates, no save's name.
void turn_into_version_one(const std::filesystem::path& folder) {
  using nlohmann::ordered_json;
  ordered_json manifest = ordered_json::parse(read_file(folder / "manifest.json"));
  manifest["version"] = 1;
  manifest.erase("save");
  manifest.erase("hash");
  manifest.erase("checksum");
  for (ordered_json& state : manifest["rank_states"]) state = ordered_json(state["state"]);
  for (ordered_json& tensor : manifest["tensors"]) {
    if (tensor["role"] == "moment") tensor["role"] = tensor["moment"];
    if (tensor.contains("coordinates") && tensor["coordinates"].contains("data")) {
      tensor["role"] = "buffer." + tensor["coordinates"]["data"].dump();
    }
    tensor.erase("moment");
    tensor.erase("coordinates");
    for (ordered_json& piece : tensor["pieces"]) {
      ASSERT_EQ(piece["sizes"].size(), 1u) << "version 1 knew ranges alone";
      const int64_t begin = piece["offsets"][0], size = piece["sizes"][0];
      // Neither did it hash what it wrote.
      piece = {{"begin", begin}, {"end", begin + size}, {"file", piece["file"]}, {"offset", piece["offset"]}};
    }
  }
  write_file(folder / "manifest.json", manifest.dump(1));
  for (const auto& item : std::filesystem::directory_iterator(folder)) {
    if (item.path().extension() != ".safetensors") continue;
    std::string shard = read_file(item.path());
    uint64_t length;
    std::memcpy(&length, shard.data(), sizeof(length));
    std::string header = shard.substr(8, length);
    for (size_t found; (found = header.find("/buffer.data=")) != std::string::npos;) {
      header.replace(found, 13, "/buffer.");
    }
    header.resize(length, ' ');  // the data stays where it is
    write_file(item.path(), shard.replace(8, length, header));
  }
}

TEST(Checkpoint, OfVersionOneLoadsInAnyWorld) {
  const Folder folder;
  std::map<std::string, Tensor> saved;
  run_ranks(2, [&](const World& world) {
    Session session(world, 3);
    session.train(0, 2);
    session.model.counter.fill_(10 + world.rank);
    session.engine.save_checkpoint(folder.path, "here");
    const auto state = session.state();
    if (world.rank == 0) saved = state;
  });
  turn_into_version_one(folder.path / "here");
  EXPECT_EQ(read_file(folder.path / "here" / "manifest.json").find("offsets"), std::string::npos);
  for (const auto& [size, stage] : {std::pair{1, 0}, {2, 3}, {3, 1}}) {
    run_ranks(size, [&, stage = stage](const World& world) {
      Session session(world, stage, false, 1.0f);
      ASSERT_TRUE(session.engine.load_checkpoint(folder.path, "here"));
      // A rank that did not save takes what the first one saved.
      EXPECT_EQ(session.model.counter.item<int64_t>(), world.rank == 1 ? 11 : 10);
      auto state = session.state();
      state["counter"].fill_(10);
      expect_same_bits(state, saved);
      EXPECT_EQ(session.engine.global_steps(), 2);
    });
  }
}

TEST(Checkpoint, KeepsEachRanksBuffersAndTheFirstOnesForRanksThatWereNotThere) {
  const Folder folder;
  run_ranks(2, [&](const World& world) {
    Session session(world, 1);
    session.model.counter.fill_(10 + world.rank);
    session.engine.save_checkpoint(folder.path, "here");
  });
  for (int size : {1, 2, 4}) {
    run_ranks(size, [&](const World& world) {
      Session session(world, 1);
      ASSERT_TRUE(session.engine.load_checkpoint(folder.path, "here"));
      EXPECT_EQ(session.model.counter.item<int64_t>(), world.rank == 1 ? 11 : 10);
    });
  }
}

TEST(Checkpoint, KeepsTheUsersFilesOfATagThatIsSavedAgain) {
  const Folder folder;
  std::filesystem::create_directories(folder.path / "best");
  write_file(folder.path / "best" / "args.json", "{}");
  run_ranks(2, [&](const World& world) {
    Session session(world, 3);
    for (int step : {0, 1}) {
      session.train(step, 1);
      session.engine.save_checkpoint(folder.path, "best");
    }
    EXPECT_TRUE(session.engine.load_checkpoint(folder.path, "best"));
  });
  EXPECT_EQ(read_file(folder.path / "best" / "args.json"), "{}");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path), {}), 2) << "the tag and `latest`";
}

TEST(Checkpoint, ThatDoesNotFitIsRefusedOnEveryRankAndChangesNothing) {
  const Folder folder;
  run_ranks(2, [&](const World& world) {
    {
      Session session(world, 3);
      session.train(0, 1);
      session.engine.save_checkpoint(folder.path);
    }
    Session other(world, 3, false, 0.0f, /*columns=*/8);
    other.train(0, 1);
    const auto before = other.state();
    try {
      other.engine.load_checkpoint(folder.path);
      ADD_FAILURE() << "loaded what does not fit";
    } catch (const CheckpointError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("nothing was changed"), std::string::npos) << text;
      EXPECT_NE(text.find("first"), std::string::npos) << text;
      EXPECT_NE(text.find("second"), std::string::npos) << text;
    }
    expect_same_bits(other.state(), before);
    other.train(1, 1);
  });
}

// Otherwise hyper-parameters of groups that this engine lacks would be dropped silently.
TEST(Checkpoint, OfOtherParameterGroupsIsRefusedUnlessOptimizerStatesStayBehind) {
  const Folder folder;
  run_ranks(2, [&](const World& world) {
    const Config config = config_of(2, false, true);
    InitOptions two_groups = Session::options(world);
    two_groups.groups = {{{"first"}, config.optimizer().defaults}, {{"second"}, config.optimizer().defaults}};
    const BareModel model;
    {
      Engine engine(model.description, config, two_groups);
      engine.backward(model.loss(0, world.rank));
      ASSERT_TRUE(engine.step().applied());
      engine.save_checkpoint(folder.path);
    }
    Session one_group(world, 2, false, 1.0f);
    const auto before = one_group.state();
    try {
      one_group.engine.load_checkpoint(folder.path);
      ADD_FAILURE() << "loaded the groups of another optimizer";
    } catch (const CheckpointError& error) {
      EXPECT_NE(std::string(error.what()).find("2 parameter groups, this engine has 1"), std::string::npos)
          << error.what();
    }
    expect_same_bits(one_group.state(), before);
    LoadOptions weights;
    weights.optimizer_states = false;
    EXPECT_TRUE(one_group.engine.load_checkpoint(folder.path, "", weights));
  });
}

TEST(Checkpoint, IsNotThereIsNoError) {
  const Folder folder;
  run_ranks(2, [&](const World& world) {
    Session session(world, 2);
    EXPECT_FALSE(session.engine.load_checkpoint(folder.path));
    EXPECT_THROW(session.engine.load_checkpoint(folder.path, "no_such_tag"), CheckpointError);
    session.train(0, 1);
  });
}

TEST(Checkpoint, SavedBetweenBackwardAndStepHoldsTheLastStepsEnd) {
  for (const int stage : {0, 3}) {
    const Folder folder;
    run_ranks(2, [&](const World& world) {
      Session session(world, stage);
      session.train(0, 2);
      auto before = session.state();
      for (auto& [name, tensor] : before) tensor = tensor.clone();
      session.engine.backward(session.model.loss(2, world.rank));
      session.engine.save_checkpoint(folder.path);
      EXPECT_TRUE(session.engine.step().applied());
      Session resumed(world, stage, false, 3.0f);
      resumed.engine.load_checkpoint(folder.path);
      expect_same_bits(resumed.state(), before);
      resumed.train(2, 1);
      expect_same_bits(resumed.state(), session.state());
    });
  }
}

TEST(Checkpoint, TakesNoClientStateThatPythonCouldNotRead) {
  const Folder folder;
  run_ranks(2, [&](const World& world) {
    Session session(world, 2);
    for (const char* text : {"", "3", "[1]", "epoch 3", "{\"a\": \\ud800}", "{\"a\": 1} 2"}) {
      try {
        session.engine.save_checkpoint(folder.path, "t", text);
        ADD_FAILURE() << text;
      } catch (const c10::ValueError& error) {
        EXPECT_NE(std::string(error.what()).find("expected a JSON object"), std::string::npos) << error.what();
      }
    }
    for (const char* text : {"{}", R"({"half": "\ud800", "both": "\\ud83d"})", R"({"a": {"b": [1, 2]}})"}) {
      session.engine.save_checkpoint(folder.path, "t", text);
      EXPECT_EQ(session.engine.load_checkpoint(folder.path, "t")->client_state_json, text);
    }
  });
}

}  // namespace
}  // namespace deeptide::checkpoint_test
