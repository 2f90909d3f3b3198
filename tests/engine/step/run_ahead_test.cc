// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Stage 3 gathers what the next forward begins with while a step goes on: the same bits, whatever a program does next.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <limits>
#include <map>

#include "engine/session.h"
#include "on_hosts.h"

namespace deeptide::run_ahead_test {
namespace {

using at::Tensor;

constexpr int kSteps = 4;
const std::vector<int> kTwo{0, 1};  // ranks on a host each

/// Room for half of the model, so that steps begin with some of its units.
constexpr const char* kLimits = R"({"zero_optimization": {"stage3_max_live_parameters": 5000}})";
constexpr const char* kNoPrefetch = R"({"zero_optimization": {"stage3_prefetch_bucket_size": 0}})";

struct Session : TrainingSession {
  Session(const World& w, int stage, int64_t gas = 1, const std::string& patch = "{}")
      : TrainingSession(w, gas, config_of(stage, kMicro, gas).with(kLimits).with(patch)) {}
};

using Action = std::function<void(Session&, int step)>;

/// Trains at stage 2 and at stage 3, `after_step` after each step, and compares all that the ranks have seen.
void expect_bits_of_stage_2(const std::vector<int>& hosts, int64_t gas, const std::string& patch,
                            const Action& after_step = {}) {
  run_on_hosts(hosts, [&](const World& world) {
    std::vector<std::vector<Tensor>> results;
    for (const int stage : {2, 3}) {
      Session session(world, stage, gas, patch);
      for (int step = 0; step < kSteps; ++step) {
        const bool applied = session.step(step).applied();
        if (stage == 3) {
          EXPECT_EQ(session.engine.live_gathered_bytes() > 0, applied) << "after step " << step;
        }
        if (after_step) after_step(session, step);
      }
      results.push_back(session.results());
    }
    expect_equal_results(results[1], results[0]);
  });
}

TEST(RunAhead, LeavesTheBitsAsTheyAre) {
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{0, 1}, {0, 1, 2}, {0, 0, 1, 1}}) {
    for (const int64_t gas : {1, 2}) expect_bits_of_stage_2(hosts, gas, "{}");
  }
}

TEST(RunAhead, LeavesTheBitsOf16BitParametersAndOfEveryKindOfRule) {
  for (const char* patch : {R"({"bf16": {"enabled": true}})", R"({"optimizer": {"type": "Lamb"}})",
                            R"({"optimizer": {"type": "Muon", "params": {"lr": 0.01}}})"}) {
    SCOPED_TRACE(patch);
    expect_bits_of_stage_2(kTwo, 1, patch);
  }
}

TEST(RunAhead, ShowsEveryReaderAndWriterTheNewValues) {
  const std::map<std::string, Action> actions{
      {"an evaluation",
       [](Session& s, int step) {
         const torch::NoGradGuard no_grad;
         s.seen.push_back(s.loss(step + 100));
       }},
      {"an evaluation on one rank",
       [](Session& s, int step) {
         const torch::NoGradGuard no_grad;
         if (s.world.rank == 0) s.seen.push_back(s.loss(step + 100));
       }},
      {"a look at the last parameter", [](Session& s, int) { s.seen.push_back(s.model->norm->bias.detach().clone()); }},
      {"a write under no_grad",
       [](Session& s, int) {
         const torch::NoGradGuard no_grad;
         s.model->embed->weight.mul_(0.5);
         s.model->norm->weight.fill_(0.75);
       }},
      {"state", [](Session& s, int) { s.seen.push_back(s.engine.full_state("norm.weight", "exp_avg")); }},
      {"written state",
       [](Session& s, int) {
         s.engine.set_full_state("embed.weight", "master", torch::ones({kVocabulary, kWidth}));
       }},
      {"a state dict",
       [](Session& s, int) {
         for (const auto& item : s.engine.module_state_dict()) s.seen.push_back(item.tensor);
       }},
      {"zero_grad", [](Session& s, int) { s.engine.zero_grad(); }},
      {"zero_grad after a write",
       [](Session& s, int) {
         {
           const torch::NoGradGuard no_grad;
           s.model->embed->weight.mul_(0.5);
         }
         s.engine.zero_grad();
       }},
      {"a released cache", [](Session& s, int) { s.engine.empty_partition_cache(); }},
      {"a step that uses the last unit alone",
       [](Session& s, int) {
         s.engine.backward(s.model->norm->weight.sum());
         EXPECT_TRUE(s.engine.step().applied());
       }},
      {"a bad loss", [](Session& s, int step) {
         s.engine.backward(s.loss(step) * std::numeric_limits<double>::quiet_NaN());
         EXPECT_FALSE(s.engine.step().applied());
       }}};
  for (const auto& [what, action] : actions) {
    SCOPED_TRACE(what);
    for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{0, 1, 2}, {0, 0, 1, 1}}) {
      expect_bits_of_stage_2(hosts, 1, "{}", action);
    }
  }
}

TEST(RunAhead, SavesAndLoadsRightAfterAStep) {
  const auto folder = std::filesystem::temp_directory_path() / ("run_ahead_" + std::to_string(::getpid()));
  expect_bits_of_stage_2({0, 1, 2}, 1, "{}", [&](Session& session, int step) {
    if (step == 1) session.engine.save_checkpoint(folder.string(), "step1");
    if (step == 2) {
      ASSERT_TRUE(session.engine.load_checkpoint(folder.string(), "step1"));
    }
  });
  std::filesystem::remove_all(folder);
}

TEST(RunAhead, KeepsToTheLimitsOfPrefetchAndOfWhatIsLive) {
  run_on_hosts(kTwo, [&](const World& world) {
    Session limited(world, 3), off(world, 3, 1, kNoPrefetch);
    for (int step = 0; step < 2; ++step) {
      limited.step(step);
      off.step(step);
      EXPECT_GT(limited.engine.live_gathered_bytes(), 0);
      EXPECT_LE(limited.engine.peak_gathered_bytes(), 4 * 5300) << "the limit, or the two largest units";
      EXPECT_EQ(off.engine.live_gathered_bytes(), 0);
    }
  });
}

TEST(RunAhead, LetsAnEngineEndWithGathersUnderWay) {
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{0, 1}, {0, 1, 2}, {0, 0, 1, 1}}) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      run_on_hosts(hosts, [&](const World& world) { EXPECT_TRUE(Session(world, 3).step(0).applied()); });
    }
  }
}

}  // namespace
}  // namespace deeptide::run_ahead_test
