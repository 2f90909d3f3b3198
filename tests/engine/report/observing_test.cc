// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Shows a C++ program its steps, and that seeing changes none of them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "engine/models.h"
#include "ranks.h"

namespace deeptide::observing {
namespace {

namespace fs = std::filesystem;

constexpr int kSteps = 5;
constexpr int64_t kMicro = 4;

struct Seen {
  std::vector<double> losses;
  std::vector<StepTimes> times;
  std::vector<CollectiveLine> collectives;
  std::vector<MonitorEvent> events;
  std::string limit, table;
};

Seen train(const World& world, const Config& config) {
  TinyModel model = make_tiny();
  Engine engine = engine_of(*model, world, config);
  engine.keep_events();
  Seen seen;
  for (int step = 0; step < kSteps; ++step) {
    const auto [tokens, targets] = batch_of(step, kMicro * world.size);
    const int64_t first = world.rank * kMicro;
    engine.begin_forward(kMicro);
    const at::Tensor loss = model(tokens.narrow(0, first, kMicro), targets.narrow(0, first, kMicro));
    engine.backward(loss);
    engine.step();
    seen.losses.push_back(loss.item<double>());
    seen.times.push_back(engine.step_times());
  }
  seen.limit = engine.limit();
  seen.collectives = engine.collectives();
  seen.table = engine.collectives_text();
  seen.events = engine.take_events();
  return seen;
}

std::vector<Seen> trained(int world, const Config& config) {
  std::vector<Seen> ranks(world);
  run_ranks(world, [&](const World& w) { ranks[w.rank] = train(w, config); });
  return ranks;
}

Config observed(const Config& config, const std::string& folder) {
  const std::string place = R"("enabled": true, "output_path": ")" + folder + '"';
  return config.with(R"({"wall_clock_breakdown": true, "memory_breakdown": true, "comms_logger": {"enabled": true},
                         "flops_profiler": {"enabled": true, "profile_step": 3, "output_file": ")" +
                     folder + R"(/profile.txt"}, "csv_monitor": {)" + place + R"(, "job_name": "csv"},
                         "deeptide": {"jsonl_monitor": {)" +
                     place + R"(, "job_name": "run"}, "timeline": {)" + place + R"(, "start_step": 2}}})");
}

class Observing : public testing::Test {
 protected:
  Observing() { fs::create_directories(folder); }
  ~Observing() override { fs::remove_all(folder); }
  const std::string folder = testing::TempDir() + "observing_test_" + std::to_string(::getpid());
};

TEST_F(Observing, TellsOfStepsAndChangesNone) {
  const Config config = apart(config_of(3, kMicro));
  const auto plain = trained(2, config);
  const auto ranks = trained(2, observed(config, folder));
  for (const int rank : {0, 1}) {
    EXPECT_EQ(ranks[rank].losses, plain[rank].losses);
    EXPECT_EQ(plain[rank].times.back().total, 0.0f);
    EXPECT_TRUE(plain[rank].collectives.empty());
    for (const StepTimes& times : ranks[rank].times) {
      EXPECT_GT(times.forward, 0.0f);
      EXPECT_NEAR(times.between + times.forward + times.backward + times.step, times.total, 0.02f * times.total);
      EXPECT_LE(times.waiting + times.files, times.total);
    }
    EXPECT_EQ(ranks[rank].limit.find("limited by "), 0u) << ranks[rank].limit;
    EXPECT_FALSE(ranks[rank].collectives.empty());
  }
  EXPECT_NE(ranks[0].table.find("all_gather"), std::string::npos) << ranks[0].table;
  EXPECT_TRUE(ranks[1].events.empty());
  std::vector<MonitorEvent> losses;
  for (const MonitorEvent& event : ranks[0].events) {
    if (event.name == "Train/Samples/train_loss") losses.push_back(event);
  }
  ASSERT_EQ(losses.size(), static_cast<size_t>(kSteps));
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_DOUBLE_EQ(losses[step].value, (ranks[0].losses[step] + ranks[1].losses[step]) / 2);
    EXPECT_EQ(losses[step].x, 2 * kMicro * (step + 1));
  }
}

TEST_F(Observing, WritesEachFileOnce) {
  trained(2, observed(apart(config_of(3, kMicro)), folder));
  for (const char* file :
       {"profile.txt", "csv/Train_Samples_train_loss.csv", "run/run.jsonl", "trace.rank0.json", "trace.rank1.json"}) {
    EXPECT_TRUE(fs::exists(folder + "/" + file)) << file;
  }
  int steps = 0;
  std::ifstream record(folder + "/run/run.jsonl");
  for (std::string line; std::getline(record, line);) steps += nlohmann::json::parse(line)["kind"] == "step" ? 1 : 0;
  EXPECT_EQ(steps, kSteps);
}

}  // namespace
}  // namespace deeptide::observing
