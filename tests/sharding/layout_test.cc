// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Units of models as people write them, and properties of the units of any model.
#include "sharding/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace deeptide::sharding {
namespace {

struct Model {
  std::vector<ParameterSpec> parameters;
  std::vector<ModuleSpec> modules;

  void add(const std::string& name, int64_t numel, at::ScalarType dtype = at::kFloat, bool trainable = true,
           int group = 0) {
    parameters.push_back({name, numel, dtype, trainable, trainable ? group : -1});
  }
};

/// Names and sizes as a transformer's, biases in group 1; `width` 256 makes its blocks too large to be merged.
Model transformer(int layers, int64_t width = 256) {
  Model model;
  model.modules = {{"", "GPT"}, {"wte", "Embedding"}, {"wpe", "Embedding"}, {"h", "ModuleList"}};
  model.add("wte.weight", 50 * width);
  model.add("wpe.weight", 32 * width);
  for (int i = 0; i < layers; ++i) {
    const std::string block = "h." + std::to_string(i);
    for (const auto& [path, type] : {std::pair{"", "Block"},
                                     {".ln", "LayerNorm"},
                                     {".attn", "Attention"},
                                     {".attn.qkv", "Linear"},
                                     {".mlp", "Mlp"},
                                     {".mlp.0", "Linear"},
                                     {".mlp.1", "Linear"}}) {
      model.modules.push_back({block + path, type});
    }
    model.add(block + ".ln.weight", width, at::kFloat, true, 1);
    model.add(block + ".attn.qkv.weight", 3 * width * width);
    model.add(block + ".attn.qkv.bias", 3 * width, at::kFloat, true, 1);
    model.add(block + ".mlp.0.weight", 4 * width * width);
    model.add(block + ".mlp.1.weight", 4 * width * width);
  }
  model.modules.push_back({"ln_f", "LayerNorm"});
  model.add("ln_f.weight", width, at::kFloat, true, 1);
  model.add("ln_f.bias", width, at::kFloat, true, 1);
  return model;
}

std::vector<std::string> names(const std::vector<UnitLayout>& units) {
  std::vector<std::string> result;
  for (const auto& unit : units) result.push_back(unit.name);
  return result;
}

using Names = std::vector<std::string>;

TEST(Layout, GivesEachRepeatedBlockAUnitAndGroupsWhatLiesBetween) {
  const Model model = transformer(3);
  EXPECT_EQ(names(build_layout(model.parameters, model.modules, {2, 0})),
            (Names{"wte.weight … wpe.weight", "h.0", "h.1", "h.2", "ln_f.weight … ln_f.bias"}));
}

TEST(Layout, MergesNeighbouringBlocksThatAreTiny) {
  const Model model = transformer(40, 8);  // a block has 736 elements
  const auto units = build_layout(model.parameters, model.modules, {1, 0});
  EXPECT_LT(units.size(), 20u);
  EXPECT_NE(std::find_if(units.begin(), units.end(), [](const auto& u) { return u.name.rfind("h.0 … h.", 0) == 0; }),
            units.end())
      << "named after its first and last block";
}

TEST(Layout, TakesTheOutermostOfNestedContainers) {
  Model model;
  model.modules = {{"", "M"}, {"stage", "List"}};
  for (const std::string stage : {"stage.0", "stage.1"}) {
    model.modules.push_back({stage, "Stage"});
    model.modules.push_back({stage + ".blocks", "List"});
    for (const std::string block : {".blocks.0", ".blocks.1"}) {
      model.modules.push_back({stage + block, "Block"});
      model.modules.push_back({stage + block + ".fc", "Linear"});
      model.add(stage + block + ".fc.weight", 100'000);
    }
  }
  EXPECT_EQ(names(build_layout(model.parameters, model.modules, {1, 0})), (Names{"stage.0", "stage.1"}));
}

TEST(Layout, TakesNoBlockFromASequenceOfPlainLayers) {
  Model model;  // numbered children without children of their own: a Sequential of Linear and ReLU
  model.modules = {{"", "Sequential"}, {"0", "Linear"}, {"1", "Linear"}, {"2", "Linear"}};
  for (const char* name : {"0.weight", "1.weight", "2.weight"}) model.add(name, 1 << 20);
  EXPECT_EQ(names(build_layout(model.parameters, model.modules, {1, 0})), (Names{"0.weight", "1.weight", "2.weight"}))
      << "grouped up to an eighth of the model";
}

TEST(Layout, DoesNotMistakeAPrefixForAParent) {
  Model model;
  model.modules = {{"", "M"}};
  for (int i : {1, 10}) {
    model.modules.push_back({"h." + std::to_string(i), "Block"});
    model.modules.push_back({"h." + std::to_string(i) + ".fc", "Linear"});
    model.add("h." + std::to_string(i) + ".fc.weight", 1 << 20);
  }
  EXPECT_EQ(names(build_layout(model.parameters, model.modules, {1, 0})), (Names{"h.1", "h.10"}));
}

TEST(Layout, SplitsABlockByTypeAndByTrainability) {
  Model model = transformer(2);
  model.parameters[3].trainable = false;  // h.0.attn.qkv.weight
  model.parameters[3].group = -1;
  model.parameters[5].dtype = at::kBFloat16;  // h.0.mlp.0.weight
  const auto units = build_layout(model.parameters, model.modules, {2, 0});
  EXPECT_EQ(names(units), (Names{"wte.weight … wpe.weight", "h.0.ln.weight … h.0.mlp.1.weight", "h.0.attn.qkv.weight",
                                 "h.0.mlp.0.weight", "h.1", "ln_f.weight … ln_f.bias"}));
  EXPECT_FALSE(units[2].trainable);
  EXPECT_EQ(units[3].dtype, at::kBFloat16);
}

TEST(Layout, SplitsABlockByKind) {
  Model model = transformer(2);
  for (ParameterSpec& spec : model.parameters) spec.kind = spec.numel > 1024 ? 1 : 0;
  const auto units = build_layout(model.parameters, model.modules, {2, 0});
  EXPECT_EQ(names(units), (Names{"wte.weight … wpe.weight", "h.0.ln.weight … h.0.attn.qkv.bias",
                                 "h.0.attn.qkv.weight … h.0.mlp.1.weight", "h.1.ln.weight … h.1.attn.qkv.bias",
                                 "h.1.attn.qkv.weight … h.1.mlp.1.weight", "ln_f.weight … ln_f.bias"}));
}

TEST(Layout, SplitsAUnitAtTheLimitButNeverAParameter) {
  const Model model = transformer(2);
  const int64_t limit = 4 * 256 * 256;
  const auto units = build_layout(model.parameters, model.modules, {2, limit});
  EXPECT_GT(units.size(), 5u);
  for (const auto& unit : units) EXPECT_LE(unit.used, limit) << unit.name;
  const auto smaller = build_layout(model.parameters, model.modules, {2, 1000});
  for (const auto& unit : smaller) EXPECT_TRUE(unit.used <= 1000 || unit.slots.size() == 1) << unit.name;
}

TEST(Layout, GivesNothingForNothing) { EXPECT_TRUE(build_layout({}, {{"", "M"}}, {4, 0}).empty()); }

// --- Properties of any model

Model random_model(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  const at::ScalarType dtypes[] = {at::kFloat, at::kBFloat16, at::kDouble, at::kHalf};
  Model model;
  model.modules = {{"", "M"}};
  const int containers = below(3), mixed = below(3);
  const auto fill = [&](const std::string& path) {
    for (int i = 0, n = 1 + below(5); i < n; ++i) {
      const int64_t numel = below(4) == 0 ? below(3) : 1 + below(below(3) ? 300 : 90'000);
      const bool special = mixed > 0 && below(4) == 0;
      model.add(path + ".p" + std::to_string(i), numel, special ? dtypes[below(4)] : at::kFloat,
                !(mixed > 1 && below(4) == 0), below(3));
      model.parameters.back().kind = mixed > 0 ? below(2) : 0;
    }
  };
  for (int c = 0; c < containers; ++c) {
    const std::string container = "c" + std::to_string(c);
    fill(container + "_before");
    for (int i = 0, n = 1 + below(6); i < n; ++i) {
      const std::string block = container + "." + std::to_string(i);
      model.modules.push_back({block, below(5) ? "Block" : "Other"});
      model.modules.push_back({block + ".fc", "Linear"});
      fill(block + ".fc");
    }
  }
  fill("head");
  return model;
}

/// One parameter with elements, and perhaps empty ones.
bool holds_one(const UnitLayout& unit) {
  return std::count_if(unit.slots.begin(), unit.slots.end(), [](const Slot& s) { return s.numel > 0; }) == 1;
}

void check_slots(const UnitLayout& unit, const Model& model) {
  const int64_t item = static_cast<int64_t>(c10::elementSize(unit.dtype));
  int64_t end = 0, used = 0;
  for (const auto& slot : unit.slots) {
    const auto& spec = model.parameters[slot.parameter];
    ASSERT_EQ(slot.numel, spec.numel);
    ASSERT_EQ(unit.dtype, spec.dtype);
    ASSERT_EQ(unit.trainable, spec.trainable);
    ASSERT_EQ(model.parameters[unit.slots.front().parameter].kind, spec.kind);
    ASSERT_GE(slot.offset, end) << "parameters do not overlap and keep their order";
    ASSERT_EQ(slot.offset * item % 64, 0);
    ASSERT_LT((slot.offset - end) * item, 64) << "no larger gap than alignment needs";
    end = slot.offset + slot.numel;
    used += slot.numel;
  }
  ASSERT_LE(end, unit.numel);
  ASSERT_EQ(used, unit.used);
}

void check_sizes(const UnitLayout& unit, int world) {
  const int64_t item = static_cast<int64_t>(c10::elementSize(unit.dtype));
  ASSERT_EQ(unit.numel, unit.shard * world);
  ASSERT_EQ(unit.shard * item % 64, 0);
  ASSERT_GT(unit.shard, 0);
  const int64_t gaps = static_cast<int64_t>(unit.slots.size()) * 64;
  ASSERT_LE(unit.numel * item, unit.used * item + gaps + world * 64)
      << "padding is a cache line per parameter and per rank";
}

class AnyLayout : public testing::TestWithParam<int> {};

TEST_P(AnyLayout, PlacesEveryParameterOnceAlignedWithinShards) {
  const int world = GetParam();
  std::mt19937 random(world);
  for (int trial = 0; trial < 200; ++trial) {
    const Model model = random_model(random);
    const int64_t limit = random() % 2 ? 0 : 1 + random() % 50'000;
    const auto units = build_layout(model.parameters, model.modules, {world, limit});
    std::multiset<int> placed;
    for (const auto& unit : units) {
      check_slots(unit, model);
      check_sizes(unit, world);
      if (HasFatalFailure()) return;
      for (const auto& slot : unit.slots) placed.insert(slot.parameter);
      if (limit > 0) {
        ASSERT_TRUE(unit.used <= limit || holds_one(unit)) << unit.name;
      }
    }
    std::multiset<int> all;
    for (int i = 0; i < static_cast<int>(model.parameters.size()); ++i) all.insert(i);
    ASSERT_EQ(placed, all);
  }
}

TEST_P(AnyLayout, HasTheSameUnitsInEveryWorld) {
  std::mt19937 random(100 + GetParam());
  for (int trial = 0; trial < 50; ++trial) {
    const Model model = random_model(random);
    const auto here = build_layout(model.parameters, model.modules, {GetParam(), 0});
    const auto alone = build_layout(model.parameters, model.modules, {1, 0});
    ASSERT_EQ(names(here), names(alone));
    for (size_t i = 0; i < here.size(); ++i) {
      ASSERT_EQ(here[i].slots.size(), alone[i].slots.size());
      for (size_t s = 0; s < here[i].slots.size(); ++s) ASSERT_EQ(here[i].slots[s].offset, alone[i].slots[s].offset);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, AnyLayout, testing::Values(1, 2, 3, 4, 5));

}  // namespace
}  // namespace deeptide::sharding
