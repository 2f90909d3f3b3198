// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Looks at what an engine sends between hosts, in which type, and what it says of its links.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "deeptide/tensor_team.h"
#include "engine/models.h"
#include "on_hosts.h"

namespace deeptide::between_hosts_test {
namespace {

using at::Tensor;

constexpr int64_t kMicro = 2;
constexpr int kSteps = 4;
constexpr const char* kBf16 = R"({"communication_data_type": "bf16"})";

struct Trained {
  std::vector<Tensor> seen;  // losses, norms, parameters
  int64_t sent_bytes = 0;    // in the last step
  std::string summary;
};

/// Bytes over all links by the summary ("2.1 MiB to rank 1, …"); KiB have one decimal there.
double volume_of(const std::string& summary) {
  static const std::map<std::string, double> units{{"B", 1.0}, {"KiB", 1024.0}, {"MiB", 1024.0 * 1024.0}};
  const size_t begin = summary.find("links: rank ");
  std::istringstream line(begin == std::string::npos ? "" : summary.substr(begin, summary.find('\n', begin) - begin));
  double bytes = 0.0;
  std::string number, unit;
  for (std::string word; line >> word; number = std::exchange(unit, word)) {
    if (word == "to" && units.contains(unit)) bytes += std::stod(number) * units.at(unit);
  }
  return bytes;
}

Trained train(const World& world, int stage, const std::string& patch) {
  TinyModel model = make_tiny();
  Engine engine = engine_of(*model, world, config_of(stage, kMicro).with(patch));
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    const auto [tokens, targets] = batch_of(step, kMicro * world.size);
    const Tensor loss =
        model(tokens.narrow(0, world.rank * kMicro, kMicro), targets.narrow(0, world.rank * kMicro, kMicro));
    engine.backward(loss);
    const StepOutcome outcome = engine.step();
    trained.seen.push_back(loss.detach());
    if (!std::isnan(outcome.grad_norm)) trained.seen.push_back(torch::tensor(outcome.grad_norm));  // else: accumulating
    trained.sent_bytes = outcome.sent_bytes;
  }
  for (const Tensor& p : model->parameters()) trained.seen.push_back(p.detach().clone());
  trained.summary = engine.summary();
  return trained;
}

bool equal(const std::vector<Tensor>& one, const std::vector<Tensor>& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [](const Tensor& a, const Tensor& b) { return torch::equal(a, b); });
}

TEST(BetweenHosts, Bf16TransportHalvesWhatGradientsSendAtEveryStage) {
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{0, 1}, {0, 1, 2}, {0, 0, 1, 1}}) {
    run_on_hosts(hosts, [&](const World& world) {
      std::vector<Trained> whole, half;
      for (int stage = 0; stage < 4; ++stage) {
        whole.push_back(train(world, stage, "{}"));
        half.push_back(train(world, stage, kBf16));
      }
      // Stage 1 sends gradients, and parameters of as many bytes.
      const int64_t gradients = whole[1].sent_bytes / 2;
      for (int stage = 0; stage < 4; ++stage) {
        EXPECT_EQ(whole[stage].sent_bytes - half[stage].sent_bytes, gradients / 2) << "stage " << stage;
        EXPECT_TRUE(equal(half[stage].seen, half[0].seen)) << "stage " << stage << " computes other numbers";
        EXPECT_FALSE(equal(half[stage].seen, whole[stage].seen)) << "nothing was rounded";
      }
      // Each unit comes in for forward and for backward, but for the last, which stays between them.
      EXPECT_GT(whole[3].sent_bytes, 2 * gradients);
      EXPECT_LE(whole[3].sent_bytes, 3 * gradients);
    });
  }
}

using Hosts = std::vector<int>;  // of each rank

/// Which ranks share a host decides what is summed before it travels, and changes no bit: of each world the first has
/// what all must see.
void expect_equal_bits(const std::vector<std::vector<Hosts>>& worlds,
                       const std::function<std::vector<Tensor>(const World&, int stage)>& seen_by) {
  for (const auto& spreads : worlds) {
    for (int stage = 0; stage < 4; ++stage) {
      std::vector<Tensor> expected;
      for (const Hosts& hosts : spreads) {
        std::vector<Tensor> seen;
        run_on_hosts(hosts, [&](const World& world) {
          auto own = seen_by(world, stage);
          if (world.rank == 0) seen = std::move(own);
        });
        if (expected.empty()) expected = seen;
        EXPECT_TRUE(equal(seen, expected))
            << "stage " << stage << ", " << hosts.size() << " ranks on hosts " << testing::PrintToString(hosts);
      }
    }
  }
}

TEST(BetweenHosts, TrainToTheSameBitsHoweverRanksAreSpread) {
  expect_equal_bits({{{0, 0, 0, 0}, {0, 1, 2, 3}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}},
                     {{0, 0, 0, 0, 0, 0}, {0, 0, 1, 1, 2, 2}, {0, 0, 0, 1, 1, 1}, {0, 1, 2, 0, 1, 2}}},
                    [](const World& world, int stage) {
                      constexpr const char* kTwoMicros =
                          R"({"gradient_accumulation_steps": 2, "gradient_clipping": 0.05})";
                      return train(world, stage, kTwoMicros).seen;
                    });
}

/// Each rank leaves out a block of its own; one step has an infinite loss on the last rank, which ends a step early.
std::vector<Tensor> train_unevenly(const World& world, int stage) {
  const bool last = world.rank == world.size - 1;
  TinyModel model = make_tiny();
  Engine engine = engine_of(*model, world, config_of(stage, kMicro));
  std::vector<Tensor> seen;
  for (int step = 0; step < (last ? kSteps - 1 : kSteps); ++step) {
    const auto [tokens, targets] = batch_of(step, kMicro * world.size);
    Tensor x = model->embed(tokens.narrow(0, world.rank * kMicro, kMicro));
    for (int block = 0; block < 3; ++block) {
      if (block != (world.rank + step) % 3) x = model->blocks[block]->as<Block>()->forward(x);
    }
    const Tensor loss = torch::nn::functional::cross_entropy(model->head(model->norm(x)),
                                                             targets.narrow(0, world.rank * kMicro, kMicro));
    engine.backward(last && step == 1 ? loss * std::numeric_limits<float>::infinity() : loss);
    const StepOutcome outcome = engine.step();
    EXPECT_EQ(outcome.applied(), step != 1) << "step " << step;
    if (outcome.applied()) seen.push_back(torch::tensor(outcome.grad_norm));
    seen.push_back(loss.detach());
  }
  engine.join();
  for (const Tensor& p : model->parameters()) seen.push_back(p.detach().clone());
  engine.join();  // ranks that diverge hold different units: one may still need the others when another has read all
  return seen;
}

TEST(BetweenHosts, TrainToTheSameBitsWhereRanksDivergeSkipAStepAndEndEarly) {
  expect_equal_bits({{{0, 0}, {0, 1}},
                     {{0, 0, 0}, {0, 0, 1}},
                     {{0, 0, 0, 0}, {0, 0, 1, 1}},
                     {{0, 0, 0, 0, 0}, {0, 0, 0, 1, 1}},
                     {{0, 0, 0, 0, 0, 0}, {0, 0, 0, 1, 1, 1}, {0, 0, 1, 1, 2, 2}}},
                    train_unevenly);
}

TEST(BetweenHosts, SumsWhatNeighboursContributeBeforeItTravels) {
  const auto crossed = [](const std::vector<int>& hosts, const std::string& patch) {
    double bytes = 0.0;
    run_on_hosts(hosts, [&](const World& world) {
      const Trained trained = train(world, 2, patch);
      if (world.rank == 0) bytes = volume_of(trained.summary);
    });
    return bytes;
  };
  // A rank of four sends three quarters of its gradients and of the parameters that it steps, one to each other rank;
  // with a neighbour, half of half the gradients, and half of its parameters' quarter.
  const double apart = crossed({0, 1, 2, 3}, "{}"), by_two = crossed({0, 0, 1, 1}, "{}");
  EXPECT_NEAR(by_two, apart / 3, 0.05 * apart);
  // Sums of two in fp32 have the bytes of two rows in bf16, which travel as they are.
  EXPECT_NEAR(crossed({0, 0, 1, 1}, kBf16), by_two, 0.05 * apart);
}

TEST(BetweenHosts, NameTheRankOfANonFiniteGradient) {
  run_on_hosts({0, 0, 1, 1}, [&](const World& world) {
    TinyModel model = make_tiny();
    Engine engine = engine_of(*model, world, config_of(2, kMicro));
    const auto [tokens, targets] = batch_of(0, kMicro * world.size);
    const Tensor loss =
        model(tokens.narrow(0, world.rank * kMicro, kMicro), targets.narrow(0, world.rank * kMicro, kMicro));
    engine.backward(world.rank == 2 ? loss * std::numeric_limits<float>::infinity() : loss);
    const StepOutcome outcome = engine.step();
    EXPECT_FALSE(outcome.applied());
    EXPECT_EQ(outcome.rank, 2);
    EXPECT_FALSE(outcome.parameter.empty());
  });
}

TEST(BetweenHosts, Bf16TransportSumsInFp32) {
  run_on_hosts({0, 1, 2}, [&](const World& world) {
    torch::nn::Linear model(torch::nn::LinearOptions(64, 1).bias(false));
    const char* text = R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 3.0}},
                           "gradient_clipping": 0.0, "communication_data_type": "bf16",
                           "zero_optimization": {"stage": 2}})";
    Engine engine = engine_of(*model, world, Config::from_text(text));
    const Tensor before = model->weight.detach().clone();
    // 256 + 1 + 1 is no number of bf16, whose neighbours there are 256 and 258, and each rounding down would give 256.
    const float own = world.rank == 0 ? 256.0f : 1.0f;
    engine.backward((model->weight * own).sum());
    EXPECT_TRUE(engine.step().applied());
    EXPECT_TRUE(torch::allclose(before - model->weight.detach(), torch::full({1, 64}, 258.0f), 1e-6, 1e-4));
  });
}

/// At stage 3 gathers that run ahead may still be under way when a step ends: they land by themselves.
TEST(BetweenHosts, StepsCountWhatTheirLinksCarryAtEveryStage) {
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{0, 1}, {0, 1, 2}}) {
    for (int stage = 0; stage < 4; ++stage) {
      run_on_hosts(hosts, [&](const World& world) {
        TinyModel model = make_tiny();
        Engine engine = engine_of(*model, world, config_of(stage, kMicro));
        double sent = 0.0;
        for (int step = 0; step < kSteps; ++step) {
          const auto [tokens, targets] = batch_of(step, kMicro * world.size);
          engine.backward(
              model(tokens.narrow(0, world.rank * kMicro, kMicro), targets.narrow(0, world.rank * kMicro, kMicro)));
          sent += static_cast<double>(engine.step().sent_bytes);
        }
        const double rounding = 128.0 * static_cast<double>(world.size - 1);
        double shown = 0.0;
        for (int attempt = 0; attempt < 1000; ++attempt) {
          shown = volume_of(engine.summary());
          if (std::abs(shown - sent) < rounding) break;
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        EXPECT_GT(sent, 10'000.0);
        EXPECT_NEAR(shown, sent, rounding) << "stage " << stage;
      });
    }
  }
}

TEST(BetweenHosts, TellsWhatLinksHaveCarried) {
  const std::map<std::vector<int>, std::string> expected{
      {{0, 1}, " KiB to rank 1"}, {{0, 1, 2}, " KiB to rank 2"}, {{0, 0, 1, 1}, " KiB to rank 2"}, {{0, 0}, ""}};
  for (const auto& [hosts, peers] : expected) {
    for (const int stage : {2, 3}) {
      run_on_hosts(hosts, [&, names = peers](const World& world) {
        const std::string text = train(world, stage, "{}").summary;
        const size_t links = text.find("links: rank ");
        if (names.empty()) {
          EXPECT_EQ(links, std::string::npos) << text;
          return;
        }
        ASSERT_NE(links, std::string::npos) << text;
        if (world.rank == 0) {
          EXPECT_NE(text.find("links: rank 0 has sent "), std::string::npos) << text;
          EXPECT_NE(text.find(names, links), std::string::npos) << text;
        }
      });
    }
  }
}

TEST(BetweenHosts, NamesRanksOfLinksByTheirCoordinates) {
  run_on_hosts({0, 0, 1, 1}, [](const World& world) {
    TinyModel model = make_tiny();
    const auto team = std::make_shared<TensorTeam>(world, 2, 60.0);
    InitOptions options;
    options.world = world;
    options.axes = tensor_axes({.tensor = 2}, world.size, {}, {}, team);
    Engine engine = initialize(*model, config_of(2, kMicro), options);
    const auto [tokens, targets] = batch_of(0, kMicro * team->data_size());
    const int64_t first = kMicro * team->data_rank();
    engine.backward(model(tokens.narrow(0, first, kMicro), targets.narrow(0, first, kMicro)));
    engine.step();
    if (world.rank > 0) return;
    const std::string text = engine.summary();
    EXPECT_NE(text.find("links: rank 0 (data 0, tensor 0) has sent "), std::string::npos) << text;
    EXPECT_NE(text.find(" to rank 2 (data 1, tensor 0)"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace deeptide::between_hosts_test
