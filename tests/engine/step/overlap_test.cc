// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// step() returns while the new parameters are on their way: the same bits, whatever a program does next.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <tuple>

#include "deeptide/zero.h"
#include "engine/session.h"
#include "errors.h"
#include "on_hosts.h"

namespace deeptide::overlap_test {
namespace {

using at::Tensor;

constexpr int64_t kMicro = TrainingSession::kMicro;
constexpr int kSteps = 4;
const std::vector<int> kTwo{0, 1};  // ranks on a host each

struct Session : TrainingSession {
  Session(const World& w, int stage, bool overlap, int64_t gas = 1, const std::string& patch = "{}")
      : TrainingSession(
            w, gas,
            config_of(stage, kMicro, gas)
                .with(patch)
                .with(std::string(R"({"deeptide": {"overlap_publish": )") + (overlap ? "true}}" : "false}}"))) {}
  StepOutcome step(int64_t number) {
    StepOutcome outcome = TrainingSession::step(number);
    seen.push_back(torch::tensor(outcome.sent_bytes));
    return outcome;
  }
  /// Whether all that the last step changed is still on its way, as far as the program has looked.
  bool is_under_way() const {
    return error_of([&] { (void)model->norm->weight.data_ptr(); }).find("on their way") != std::string::npos;
  }

  Tensor kept;
};

/// Trains without and with overlap, `after_step` after each step, and compares all that the ranks have seen.
void expect_same_bits(const std::vector<int>& hosts, int stage, int64_t gas, const std::string& patch,
                      const std::function<void(Session&, int)>& after_step = {}) {
  run_on_hosts(hosts, [&](const World& world) {
    std::vector<std::vector<Tensor>> results;
    for (const bool overlap : {false, true}) {
      Session session(world, stage, overlap, gas, patch);
      for (int step = 0; step < kSteps; ++step) {
        session.step(step);
        if (after_step) after_step(session, step);
      }
      results.push_back(session.results());
    }
    SCOPED_TRACE(stage);
    expect_equal_results(results[1], results[0]);
  });
}

TEST(Overlap, LeavesTheBitsAsTheyAre) {
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 0, 1, 1}}) {
    for (const int stage : {1, 2}) {
      for (const int64_t gas : {1, 2}) expect_same_bits(hosts, stage, gas, "{}");
    }
  }
}

TEST(Overlap, LeavesTheBitsOf16BitParametersAndOfEveryKindOfRule) {
  for (const char* patch :
       {R"({"bf16": {"enabled": true}})", R"({"bf16": {"enabled": true, "bf16_master_weights_and_grads": true}})",
        R"({"optimizer": {"type": "Lamb"}})", R"({"optimizer": {"type": "Muon", "params": {"lr": 0.01}}})",
        R"({"deeptide": {"keep_grad": true}})", R"({"deeptide": {"drift_interval": 2, "on_drift": "stop"}})"}) {
    SCOPED_TRACE(patch);
    for (const int stage : {1, 2}) expect_same_bits(kTwo, stage, 1, patch);
  }
}

TEST(Overlap, ShowsEveryReaderAndWriterTheNewValues) {
  const std::map<std::string, std::function<void(Session&, int)>> actions{
      {"an evaluation",
       [](Session& session, int step) {
         const torch::NoGradGuard no_grad;
         session.seen.push_back(session.loss(step + 100));
       }},
      {"a look at one parameter", [](Session& s, int) { s.seen.push_back(s.model->norm->bias.detach().clone()); }},
      {"a view that was kept",
       [](Session& s, int) {
         if (!s.kept.defined()) s.kept = s.model->embed->weight.t().detach();
         s.seen.push_back(s.kept.sum());
       }},
      {"a write under no_grad",
       [](Session& s, int) {
         const torch::NoGradGuard no_grad;
         s.model->embed->weight.mul_(0.5);
         s.model->norm->weight.fill_(0.75);
       }},
      {"a write through .data", [](Session& s, int) { s.model->norm->weight.variable_data().fill_(0.25); }},
      {"an average",
       [](Session& s, int) {
         s.seen.push_back(torch::cat({s.model->norm->weight, s.model->norm->bias}));
       }},
      {"state", [](Session& s, int) { s.seen.push_back(s.engine.full_state("norm.weight", "exp_avg")); }},
      {"written state",
       [](Session& s, int) { s.engine.set_full_state("norm.bias", "master", torch::full({kWidth}, 0.125)); }},
      {"a state dict",
       [](Session& s, int) {
         for (const auto& item : s.engine.module_state_dict()) s.seen.push_back(item.tensor);
       }},
      {"zero_grad", [](Session& s, int) { s.engine.zero_grad(); }},
      {"a bad loss",
       [](Session& s, int step) {
         s.engine.backward(s.loss(step) * std::numeric_limits<double>::quiet_NaN());
         EXPECT_FALSE(s.engine.step().applied());
       }},
      {"a step that uses little", [](Session& s, int) {
         s.engine.backward(s.model->embed->weight.sum());
         EXPECT_TRUE(s.engine.step().applied());
       }}};
  for (const auto& [what, action] : actions) {
    SCOPED_TRACE(what);
    expect_same_bits(kTwo, 2, 1, "{}", action);
  }
}

TEST(Overlap, SavesAndLoadsRightAfterAStep) {
  for (const int stage : {1, 2}) {
    const auto folder = std::filesystem::temp_directory_path() / ("overlap_" + std::to_string(::getpid()));
    expect_same_bits({0, 1, 2}, stage, 1, "{}", [&](Session& session, int step) {
      const std::string tag = "step" + std::to_string(step);
      if (step == 1) session.engine.save_checkpoint(folder.string(), tag);
      if (step == 2) {
        ASSERT_TRUE(session.engine.load_checkpoint(folder.string(), "step1"));
      }
    });
    std::filesystem::remove_all(folder);
  }
}

TEST(Overlap, ReturnsFromAStepBeforeItsParametersAreThere) {
  for (const int stage : {1, 2}) {
    run_on_hosts(kTwo, [&](const World& world) {
      Session session(world, stage, /*overlap=*/true);
      EXPECT_FALSE(session.is_under_way());
      session.step(0);
      EXPECT_TRUE(session.is_under_way());
      session.engine.zero_grad();
      EXPECT_TRUE(session.is_under_way()) << "dropping gradients needs no parameter";
      (void)session.model->embed->weight.sum();
      EXPECT_TRUE(session.is_under_way()) << "a later unit is not waited for";
      (void)session.model->norm->weight.sum();
      EXPECT_FALSE(session.is_under_way());
      session.step(1);
      EXPECT_TRUE(session.is_under_way());
      session.engine.full_state("embed.weight", "master");
      EXPECT_FALSE(session.is_under_way());
    });
  }
}

TEST(Overlap, LetsNativeCodeWaitForAParameter) {
  run_on_hosts(kTwo, [&](const World& world) {
    std::vector<Tensor> values;
    for (const bool overlap : {false, true}) {
      Session session(world, 2, overlap);
      session.step(0);
      EXPECT_EQ(session.is_under_way(), overlap);
      zero::wait_for_values(session.model->norm->weight);
      EXPECT_FALSE(session.is_under_way());
      zero::wait_for_values(session.model->norm->weight.storage());
      zero::wait_for_values(torch::ones(3));
      values.push_back(torch::from_blob(session.model->norm->weight.data_ptr(), {kWidth}).clone());
    }
    EXPECT_TRUE(torch::equal(values[0], values[1]));
  });
}

/// The summary's words for the place of publishing; of a rank of its own host, or of one host for all.
std::string publishing_of(bool several_hosts, int stage, const std::string& patch) {
  std::string line;
  run_on_hosts(several_hosts ? kTwo : std::vector<int>{0, 0}, [&](const World& world) {
    TinyModel model = make_tiny();
    Engine engine = engine_of(*model, world, config_of(stage, kMicro).with(patch));
    const std::string text = engine.summary();
    const size_t begin = text.find("publishing: ");
    if (world.rank == 0 && begin != std::string::npos) line = text.substr(begin, text.find('\n', begin) - begin);
  });
  return line;
}

TEST(Overlap, IsTheDefaultBetweenHosts) {
  const std::string on = "publishing: beside the next forward";
  for (const char* unasked : {"{}", R"({"deeptide": {"overlap_publish": "auto"}})"}) {
    for (const int stage : {1, 2}) {
      EXPECT_EQ(publishing_of(true, stage, unasked), on + " (overlap_publish is not given)");
    }
    EXPECT_EQ(publishing_of(true, 0, unasked), "");
    EXPECT_EQ(publishing_of(true, 3, unasked), "");
    EXPECT_EQ(publishing_of(false, 2, unasked), "");
  }
  EXPECT_EQ(publishing_of(true, 2, R"({"deeptide": {"shared_memory": false}})"), "");
  EXPECT_EQ(publishing_of(true, 2, R"({"deeptide": {"overlap_publish": false}})"), "");
  EXPECT_EQ(publishing_of(true, 2, R"({"deeptide": {"overlap_publish": true}})"), on);
}

TEST(Overlap, GivesTheProgramItsParametersWhenTheEngineEnds) {
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{0, 1}, {0, 1, 2}, {0, 0, 1, 1}}) {
    run_on_hosts(hosts, [&](const World& world) {
      std::vector<std::vector<Tensor>> weights;
      for (const bool overlap : {false, true}) {
        TinyModel model = make_tiny();
        {
          Session session(world, 2, overlap);
          session.step(0);
          session.step(1);
          model = session.model;
        }
        auto& values = weights.emplace_back();
        for (const Tensor& p : model->parameters()) {
          EXPECT_NE(p.data_ptr(), nullptr);
          EXPECT_FALSE(p.key_set().has(c10::DispatchKey::DeferredInit));
          values.push_back(p.detach().clone());
        }
      }
      for (size_t i = 0; i < weights[0].size(); ++i) EXPECT_TRUE(torch::equal(weights[0][i], weights[1][i])) << i;
    });
  }
}

TEST(Overlap, HasNoEffectWhereNothingIsGatheredAfterAStep) {
  for (const int stage : {0, 2, 3}) {
    run_ranks(2, [&](const World& world) {
      TinyModel model = make_tiny();
      const Ranks ranks = stage == 2 ? Ranks::together : Ranks::apart;
      const Config config =
          config_of(stage, kMicro, 1, false, ranks).with(R"({"deeptide": {"overlap_publish": true}})");
      Engine engine = engine_of(*model, world, config);
      EXPECT_NE(engine.summary().find("publishing: within step()"), std::string::npos) << engine.summary();
      const auto [tokens, targets] = batch_of(0, kMicro);
      engine.backward(model(tokens, targets));
      EXPECT_TRUE(engine.step().applied());
      if (stage != 3) {
        EXPECT_NE(model->norm->weight.data_ptr(), nullptr);
      }
    });
  }
}

TEST(Overlap, TellsOfARankThatEndsInstead) {
  const auto errors = errors_of_ranks(2, [](World world) {
    world.host = "host " + std::to_string(world.rank);
    Session session(world, 2, /*overlap=*/true);
    session.step(0);
    if (world.rank == 1) throw std::runtime_error("out of luck");
    const Tensor loss = session.loss(1);  // what rank 1 has started arrives
    session.engine.backward(loss);
    session.engine.step();
  });
  EXPECT_EQ(errors[1], "out of luck");
  EXPECT_NE(errors[0].find("rank 1 has ended training at step 1"), std::string::npos) << errors[0];
}

}  // namespace
}  // namespace deeptide::overlap_test
