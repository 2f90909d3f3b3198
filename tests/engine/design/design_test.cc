// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table of units, on paper: no rank is asked and nothing is allocated.
#include "engine/design/design.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "deeptide/plan.h"
#include "engine/design/optimizer_groups.h"
#include "engine/models.h"
#include "errors.h"
#include "ranks.h"
#include "tiers/swap_file.h"

namespace deeptide::engine {
namespace {

using sharding::UnitMemory;
using world::Axis;

Design design_of(const Config& config, const Topology& topology) {
  TinyModel model = make_tiny();
  const ModelDescription description = describe(*model);
  return design(read_model(description, optimizer_groups(description, config, {})), config, {}, topology);
}

/// A mesh of data x expert ranks: h.0 is sharded within the experts and reduced over all, h.1 is each expert's own.
Topology grid(int data, int experts, int rank) {
  world::Mesh::Sizes sizes{1, 1, 1, 1, 1};
  sizes[static_cast<size_t>(Axis::data)] = data;
  sizes[static_cast<size_t>(Axis::expert)] = experts;
  return {.mesh = world::Mesh(data * experts, sizes),
          .rank = rank,
          .tenancies = {{"h.0.", {Axis::expert}, {Axis::data, Axis::expert}}, {"h.1.", {Axis::data}, {Axis::data}}}};
}

const UnitRow& row_of(const Design& design, const std::string& name) {
  const auto found =
      std::find_if(design.units.begin(), design.units.end(), [&](const auto& row) { return row.layout.name == name; });
  if (found == design.units.end()) throw std::logic_error("no unit " + name);
  return *found;
}

TEST(Design, GivesEachUnitTheTeamsOfItsAxes) {
  const Design third = design_of(config_of(3, 2, 1, false, Ranks::apart), grid(2, 2, 3));
  const UnitRow &narrow = row_of(third, "h.0"), &own = row_of(third, "h.1"), &plain = row_of(third, "h.2");
  EXPECT_EQ(narrow.place.shard_over.ranks(), (std::vector<int>{2, 3}));
  EXPECT_EQ(narrow.place.reduce_over.ranks(), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(own.place.shard_over.ranks(), (std::vector<int>{1, 3}));
  EXPECT_EQ(own.place.reduce_over.ranks(), (std::vector<int>{1, 3}));
  EXPECT_EQ(plain.place.shard_over.ranks(), plain.place.reduce_over.ranks());
  EXPECT_EQ(plain.layout.shard * 4, plain.layout.numel);
  EXPECT_EQ(narrow.layout.shard * 2, narrow.layout.numel);
  for (const UnitRow* row : third.trained()) {
    EXPECT_EQ(row->divisor, 4) << "all ranks train on batches of their own";
    EXPECT_EQ(row->route, Route::all_to_all);
    EXPECT_EQ(row->parameters.device, row->layout.shard);
    EXPECT_EQ(row->gradients.device, row->layout.shard);
    EXPECT_EQ(row->states.device, row->layout.shard);
  }
  // Over all four, over {2, 3} and over {1, 3}: for gathers and for reductions.
  EXPECT_EQ(third.channels().size(), 6U);
}

TEST(Design, HasEachSliceSavedByOneOfItsHolders) {
  int64_t saved = 0, held = 0;
  for (int rank = 0; rank < 4; ++rank) {
    const Design design = design_of(config_of(2, 2, 1, false, Ranks::apart), grid(2, 2, rank));
    const UnitRow& narrow = row_of(design, "h.0");
    saved += narrow.saves ? narrow.layout.shard : 0;
    held += narrow.layout.shard;
    EXPECT_TRUE(row_of(design, "h.1").saves) << "its two ranks have a slice each";
  }
  const Design first = design_of(config_of(2, 2, 1, false, Ranks::apart), grid(2, 2, 0));
  EXPECT_EQ(saved, row_of(first, "h.0").layout.numel);
  EXPECT_EQ(held, 2 * saved);
}

TEST(Design, OfOtherKeysKeepsTheModel) {
  const Config config = config_of(0, 2, 1, true, Ranks::apart);
  const Design before = design_of(config, {.mesh = world::Mesh::data_parallel(8)});
  const Config sharded = config.with(R"({"zero_optimization": {"stage": 3}})");
  const Design after = design(before, sharded, before.topology);
  ASSERT_EQ(after.units.size(), before.units.size());
  for (size_t i = 0; i < after.units.size(); ++i) {
    EXPECT_EQ(before.units[i].place.memory, UnitMemory::whole);
    EXPECT_EQ(after.units[i].place.memory, UnitMemory::sharded);
    EXPECT_EQ(after.units[i].layout.numel, before.units[i].layout.numel);
    EXPECT_EQ(after.units[i].states.device * 8, before.units[i].states.device);
  }
}

/// The tiny model's parameters, so many times as large.
Design large_design_of(const Config& config, int times = 20'000) {
  TinyModel model = make_tiny();
  const ModelDescription description = describe(*model);
  ModelFacts facts = read_model(description, optimizer_groups(description, config, {}));
  for (ParameterFacts& p : facts.parameters) p.numel *= times;
  return design(std::move(facts), config, {}, {.mesh = world::Mesh::data_parallel(2)});
}

TEST(Design, CutsWhatFilesHaveOfStatesAndSums) {
  const Config config = config_of(2, 2, 1, true, Ranks::apart).with(R"({"deeptide": {"placement": {
      "optimizer_states": {"cpu": "30%", "nvme": "rest"}, "gradients": {"cpu": "60%", "nvme": "rest"}, "nvme_path": "/"}}})");
  const Design design = large_design_of(config);
  double states = 0, states_in_memory = 0, sums = 0, sums_in_memory = 0;
  const auto trained = design.trained();
  for (size_t unit = 0; unit < trained.size(); ++unit) {
    const UnitRow& row = *trained[unit];
    ASSERT_EQ(row.placed.size(), 3u) << "a master and two moments";
    for (const zero::StateForecast& state : row.placed) {
      EXPECT_EQ(state.numel, row.states.device);
      EXPECT_EQ(state.in_memory, design.types.in_memory.at(unit).at(state.state)) << "as the optimizer takes it";
      states += static_cast<double>(state.nbytes());
      states_in_memory += static_cast<double>(state.in_memory * state.item_bytes());
    }
    EXPECT_EQ(row.gradients.device, design.reductions.stays.at(unit)) << "as the reducer takes it";
    EXPECT_EQ(row.gradients.device + row.gradients.files, row.layout.shard);
    sums += 4.0 * static_cast<double>(row.layout.shard);
    sums_in_memory += 4.0 * static_cast<double>(row.gradients.device);
  }
  constexpr double kHalfBlock = tiers::kSwapBlockBytes / 2.0 + 1.0;
  EXPECT_GT(states, 40 * kHalfBlock);
  EXPECT_NEAR(states_in_memory, 0.3 * states, kHalfBlock);
  EXPECT_NEAR(sums_in_memory, 0.6 * sums, kHalfBlock);
}

TEST(Design, HasAPlaceForAMomentumThatBeginsLater) {
  const Config config = config_of(2, 2, 1, true, Ranks::apart).with(R"({
      "optimizer": {"type": "SGD", "params": {"lr": 0.1, "betas": null, "eps": null, "weight_decay": null}},
      "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/", "ratio": 0.5}}})");
  const Design design = large_design_of(config);
  int64_t kept = 0, later_in_files = 0;
  for (const zero::StateForecast& state : design.states()) {
    EXPECT_EQ(state.kept, state.state == 0) << "the master";
    kept += state.kept ? state.nbytes() : 0;
    later_in_files += state.kept ? 0 : state.numel - state.in_memory;
  }
  EXPECT_EQ(zero::total_bytes(design.states()), kept) << "what is not kept takes nothing";
  EXPECT_GT(later_in_files, 0);
}

TEST(Design, PlansAThousandRanks) {
  TinyModel model = make_tiny();
  const Config config = config_of(3, 2, 1, true, Ranks::apart);
  const MemoryPlan flat = plan(describe(*model), config, {}, {.size = 1024, .ranks_per_host = 8});
  const Design design = design_of(config, {.mesh = world::Mesh::data_parallel(1024)});
  int64_t parameters = 0, states = 0;
  for (const UnitRow& row : design.units) {
    EXPECT_EQ(row.layout.shard * 1024, row.layout.numel);
    parameters += row.layout.shard * static_cast<int64_t>(c10::elementSize(row.layout.dtype));
    states += row.layout.shard * 3 * static_cast<int64_t>(sizeof(float));  // a master and two moments
  }
  EXPECT_EQ(flat.lines[static_cast<size_t>(MemoryRole::parameters)].memory_bytes, parameters);
  EXPECT_EQ(flat.lines[static_cast<size_t>(MemoryRole::optimizer_states)].memory_bytes, states);

  InitOptions options;
  Axes axes;
  axes.sizes = {1, 128, 8, 1, 1};
  axes.tenancies = grid(128, 8, 0).tenancies;
  options.axes = std::make_shared<const Axes>(axes);
  const MemoryPlan on_mesh = plan(describe(*model), config, options, {.size = 1024, .ranks_per_host = 8});
  EXPECT_GT(on_mesh.peak_bytes(), flat.peak_bytes()) << "slices of eighths are larger than of 1,024ths";
  options.axes = std::make_shared<const Axes>(Axes{.sizes = {1, 100, 8, 1, 1}});
  EXPECT_NE(error_of([&] { plan(describe(*model), config, options, {.size = 1024}); }).find("1024"), std::string::npos);
}

TEST(ActivationPolicy, IsRefusedForAModelInCpp) {
  run_ranks(1, [](const World& world) {
    const auto start = [&](const std::string& section) {
      TinyModel model = make_tiny();
      InitOptions options;
      options.world = world;
      const std::string before =
          R"({"train_batch_size": 2, "optimizer": {"type": "Adam"}, "activation_checkpointing": {)";
      initialize(*model, Config::from_text(before + section + "}}"), options);
    };
    for (const char* section : {R"("policy": "recompute")", R"("policy": "auto", "memory": "1GiB")"}) {
      try {
        start(section);
        ADD_FAILURE() << "accepted: " << section;
      } catch (const ConfigError& error) {
        EXPECT_NE(std::string(error.what()).find("the model is a C++ module"), std::string::npos) << error.what();
      }
    }
    for (const char* section : {R"("policy": "none")", R"("policy": "auto")", R"("cpu_checkpointing": true)"}) {
      EXPECT_NO_THROW(start(section)) << section;
    }
  });
}

}  // namespace
}  // namespace deeptide::engine
