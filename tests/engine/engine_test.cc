// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Trains a C++ model as a whole: the same numbers at every stage, and outcomes that say what
// happened.
#include "deeptide/engine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <tuple>

#include "base/sanitizers.h"
#include "comm/team.h"
#include "engine/models.h"
#include "errors.h"
#include "ranks.h"

namespace deeptide {
namespace {

using at::Tensor;

constexpr int kSteps = 6;
constexpr int64_t kMicro = 2;

using Weights = std::map<std::string, Tensor>;

struct Trained {
  std::vector<double> losses, norms;
  Weights weights;  // fp32
};

Weights weights_of(TinyModelImpl& model, Engine& engine) {
  Weights weights;
  for (const auto& item : model.named_parameters()) weights[item.key()] = engine.full_state(item.key(), "master");
  return weights;
}

Trained train_rank(const World& world, int stage, int64_t gas, bool bf16, Ranks ranks) {
  TinyModel model = make_tiny();
  Engine engine = engine_of(*model, world, config_of(stage, kMicro, gas, bf16, ranks));
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    const auto [tokens, targets] = batch_of(step, kMicro * gas * world.size);
    double total = 0.0;
    StepOutcome outcome;
    for (int64_t micro = 0; micro < gas; ++micro) {
      const int64_t first = (micro * world.size + world.rank) * kMicro;
      const Tensor loss = model(tokens.narrow(0, first, kMicro), targets.narrow(0, first, kMicro));
      engine.backward(loss);
      outcome = engine.step();
      total += loss.item<double>() / static_cast<double>(gas);
    }
    EXPECT_TRUE(outcome.applied()) << outcome.reason;
    trained.losses.push_back(total);
    trained.norms.push_back(outcome.grad_norm);
  }
  trained.weights = weights_of(*model, engine);
  return trained;
}

/// By rank; trained once per setting.
const std::vector<Trained>& trained(int world, int stage, int64_t gas, bool bf16, Ranks how) {
  static std::map<std::tuple<int, int, int64_t, bool, Ranks>, std::vector<Trained>> known;
  auto& ranks = known[{world, stage, gas, bf16, how}];
  if (ranks.empty()) {
    ranks.resize(world);
    run_ranks(world, [&](const World& w) { ranks[w.rank] = train_rank(w, stage, gas, bf16, how); });
  }
  return ranks;
}

/// torch's own AdamW on the joined batch.
Trained reference(int world, int64_t gas) {
  TinyModel model = make_tiny();
  std::vector<Tensor> distinct;  // given twice, the tied weight would be stepped twice
  for (const auto& item : model->named_parameters()) {
    if (item.key() != "head.weight") distinct.push_back(item.value());
  }
  torch::optim::AdamW optimizer(distinct,
                                torch::optim::AdamWOptions(1e-2).betas({0.9, 0.95}).eps(1e-5).weight_decay(0.1));
  Trained result;
  for (int step = 0; step < kSteps; ++step) {
    const auto [tokens, targets] = batch_of(step, kMicro * gas * world);
    const Tensor loss = model(tokens, targets);
    loss.backward();
    result.norms.push_back(torch::nn::utils::clip_grad_norm_(distinct, 1.0));
    optimizer.step();
    optimizer.zero_grad();
    result.losses.push_back(loss.item<double>());
  }
  for (const auto& item : model->named_parameters()) result.weights[item.key()] = item.value().detach().clone();
  return result;
}

void expect_same_bits(const std::vector<Trained>& one, const std::vector<Trained>& other) {
  ASSERT_EQ(one.size(), other.size());
  for (size_t r = 0; r < one.size(); ++r) {
    EXPECT_EQ(one[r].losses, other[r].losses);
    EXPECT_EQ(one[r].norms, other[r].norms);
    for (const auto& [name, weight] : one[r].weights)
      EXPECT_TRUE(torch::equal(weight, other[r].weights.at(name))) << name;
  }
}

class Stages : public testing::TestWithParam<int> {};

TEST_P(Stages, TrainAsTorchDoesOnTheJoinedBatch) {
  const int world = GetParam();
  for (const int64_t gas : {1, 3}) {
    const Trained expected = reference(world, gas);
    const auto& ranks = trained(world, 3, gas, false, Ranks::apart);
    // Sums of W parts differ from one sum by their order, sqrt(n) * 2^-24 relative; Adam divides by sqrt(v) + 1e-5.
    for (const auto& [name, weight] : expected.weights) {
      EXPECT_TRUE(torch::allclose(ranks[0].weights.at(name), weight, 2e-5, 2e-5)) << name << ", gas " << gas;
    }
    for (int step = 0; step < kSteps; ++step) {
      double loss = 0.0;
      for (const Trained& rank : ranks) loss += rank.losses[step] / world;
      EXPECT_NEAR(loss, expected.losses[step], 2e-5 * expected.losses[step]) << "step " << step;
      EXPECT_NEAR(ranks[0].norms[step], expected.norms[step], 1e-4 * expected.norms[step]) << "step " << step;
    }
  }
}

TEST_P(Stages, AreBitEqualInFp32AndBf16) {
  const int world = GetParam();
  // Ranks of one host take one path at every stage; only ranks apart take each stage's own.
  for (const bool bf16 : {false, true}) {
    const auto at = [&](int stage, int64_t gas, Ranks ranks) { return trained(world, stage, gas, bf16, ranks); };
    for (const Ranks ranks : {Ranks::apart, Ranks::together}) {
      for (int stage : {0, 1, 2, 3}) expect_same_bits(at(0, 1, Ranks::apart), at(stage, 1, ranks));
      for (int stage : {0, 1}) expect_same_bits(at(0, 3, Ranks::apart), at(stage, 3, ranks));
      for (int stage : {2, 3}) expect_same_bits(at(2, 3, Ranks::apart), at(stage, 3, ranks));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Stages, testing::Values(1, 2, 3, 4));

// Two models side by side on a mesh of 2 x 2: each trains over its own data team as if that were the whole world.
TEST(Teams, TrainAsAWorldOfTheirOwn) {
  constexpr int kTeam = 2;
  for (const Ranks how : {Ranks::apart, Ranks::together}) {
    std::vector<std::vector<Trained>> stages(2, std::vector<Trained>(kTeam));
    run_ranks(2 * kTeam, [&](const World& w) {
      const world::Mesh mesh(w.size, {2, kTeam, 1, 1, 1});
      const auto team = comm::Team::along(mesh, w.rank, {world::Axis::data});
      const int pipe = mesh.coordinates(w.rank)[static_cast<int>(world::Axis::pipe)];
      stages[pipe][team.index()] = train_rank(team.within(w), 3, 1, false, how);
    });
    for (const auto& ranks : stages) expect_same_bits(ranks, trained(kTeam, 3, 1, false, how));
  }
}

/// One model and engine per rank, at stage 3 unless said otherwise.
struct Session {
  explicit Session(const World& w, int stage = 3, int64_t gas = 1, bool bf16 = false, Ranks ranks = Ranks::together)
      : world(w), engine(engine_of(*model, w, config_of(stage, kMicro, gas, bf16, ranks))) {}
  Tensor loss(int step) {
    const auto [tokens, targets] = batch_of(step, kMicro * world.size);
    const int64_t first = kMicro * world.rank;
    return model(tokens.narrow(0, first, kMicro), targets.narrow(0, first, kMicro));
  }
  StepOutcome step(int number) {
    engine.backward(loss(number));
    return engine.step();
  }
  TinyModel model = make_tiny();
  World world;
  Engine engine;
};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(Engine, SaysHowFarTheAccumulationIs) {
  run_ranks(2, [](const World& world) {
    Session session(world, 2, 3);
    for (const char* reason : {"accumulating 1/3", "accumulating 2/3", ""}) {
      const StepOutcome outcome = session.step(0);
      EXPECT_EQ(outcome.reason, reason);
      EXPECT_EQ(outcome.applied(), outcome.reason.empty());
      EXPECT_EQ(std::isnan(outcome.grad_norm), !outcome.applied());
    }
    EXPECT_EQ(session.engine.global_steps(), 1);
    EXPECT_EQ(session.engine.micro_steps(), 3);
    EXPECT_EQ(session.engine.global_samples(), 2 * 3 * kMicro);
  });
}

TEST(Engine, SkipsABadStepEverywhereNamesItsCauseAndTouchesNothing) {
  for (int stage = 0; stage < 4; ++stage) {
    run_ranks(2, [&](const World& world) {
      Session session(world, stage);
      ASSERT_TRUE(session.step(0).applied());
      const Weights before = weights_of(*session.model, session.engine);
      Tensor loss = session.loss(1);
      if (world.rank == 1) loss = loss + (session.model->norm->bias * std::numeric_limits<float>::quiet_NaN()).sum();
      session.engine.backward(loss);
      const StepOutcome outcome = session.engine.step();
      EXPECT_FALSE(outcome.applied());
      EXPECT_EQ(outcome.result, StepResult::non_finite);
      EXPECT_EQ(outcome.reason, "non-finite gradient");
      EXPECT_EQ(outcome.rank, 1);
      EXPECT_EQ(outcome.parameter, "norm.bias");
      EXPECT_EQ(session.engine.skipped_steps(), 1);
      for (const auto& [name, weight] : weights_of(*session.model, session.engine)) {
        EXPECT_TRUE(torch::equal(weight, before.at(name))) << name << " at stage " << stage;
      }
      EXPECT_TRUE(session.step(2).applied());
    });
  }
}

TEST(Engine, ExplainsALossThatCannotBeDifferentiated) {
  run_ranks(1, [](const World& world) {
    Session session(world);
    EXPECT_TRUE(contains(error_of([&] { session.engine.backward(Tensor()); }), "the loss is undefined"));
    EXPECT_TRUE(
        contains(error_of([&] { session.engine.backward(torch::ones({2})); }), "must be a scalar, got shape [2]"));
    EXPECT_TRUE(
        contains(error_of([&] { session.engine.backward(session.loss(0).detach()); }), "does not require grad"));
    EXPECT_TRUE(contains(error_of([&] { session.engine.step(); }), "step() before backward()"));
    EXPECT_TRUE(session.step(0).applied()) << "and goes on";
  });
}

TEST(Engine, LeavesAModelItRefusesAsItWas) {
  run_ranks(2, [](const World& world) {
    TinyModel model = make_tiny();
    for (Tensor& p : model->parameters()) p.set_requires_grad(false);
    const std::string text = error_of([&] { engine_of(*model, world, config_of(3)); });
    EXPECT_TRUE(contains(text, "no trainable parameters")) << text;
    TinyModel twin = make_tiny();
    EXPECT_EQ(error_of([&] { (void)model->embed->weight.data_ptr(); }), "none");
    EXPECT_TRUE(torch::equal(model->embed->weight, twin->embed->weight));
  });
}

TEST(Engine, LetsRanksRunOutOfDataAtDifferentTimes) {
  for (int stage : {0, 2, 3}) {
    run_ranks(3, [&](const World& world) {
      Session session(world, stage);
      for (int step = 0; step < 2 + 2 * world.rank; ++step) EXPECT_TRUE(session.step(step).applied());
      session.engine.join();
      EXPECT_EQ(session.engine.global_steps(), 6);
    });
  }
}

/// The branch that one of three ranks takes before step(): without the last blocks and the head, a single
/// parameter, or the whole model.
Tensor branch_loss(TinyModelImpl& model, int step, int rank) {
  const auto whole = [&] {
    const auto [tokens, targets] = batch_of(step, kMicro * 3);
    return model.forward(tokens.narrow(0, kMicro * rank, kMicro), targets.narrow(0, kMicro * rank, kMicro));
  };
  Tensor loss;
  if ((step + rank) % 3 == 0) {
    loss = model.blocks[0]->as<Block>()->forward(model.embed(torch::arange(3))).square().mean();
  } else if ((step + rank) % 3 == 1) {
    loss = model.norm->weight.sum();
  } else {
    loss = whole();
  }
  return rank == 0 ? loss + whole() * 0.5 : loss;
}

/// The mean of the three ranks' losses on one process, with torch's own AdamW.
Weights branches_on_one_process(int steps) {
  TinyModel model = make_tiny();
  std::vector<Tensor> distinct;
  for (const auto& item : model->named_parameters()) {
    if (item.key() != "head.weight") distinct.push_back(item.value());
  }
  torch::optim::AdamW optimizer(distinct,
                                torch::optim::AdamWOptions(1e-2).betas({0.9, 0.95}).eps(1e-5).weight_decay(0.1));
  for (int step = 0; step < steps; ++step) {
    ((branch_loss(*model, step, 0) + branch_loss(*model, step, 1) + branch_loss(*model, step, 2)) / 3).backward();
    torch::nn::utils::clip_grad_norm_(distinct, 1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
  Weights weights;
  for (const auto& item : model->named_parameters()) weights[item.key()] = item.value().detach().clone();
  return weights;
}

TEST(Engine, ServesRanksThatTakeDifferentBranches) {
  constexpr int kBranchSteps = 4;
  const Weights expected = branches_on_one_process(kBranchSteps);
  for (const Ranks ranks : {Ranks::apart, Ranks::together}) {
    for (int stage : {1, 3}) {
      run_ranks(3, [&](const World& world) {
        Session session(world, stage, 1, false, ranks);
        for (int step = 0; step < kBranchSteps; ++step) {
          if (world.rank == 2) {  // evaluation in between
            torch::NoGradGuard no_grad;
            session.loss(step + 1);
          }
          session.engine.backward(branch_loss(*session.model, step, world.rank));
          EXPECT_TRUE(session.engine.step().applied());
        }
        // Sums in another order, as in TrainAsTorchDoesOnTheJoinedBatch.
        for (const auto& [name, weight] : weights_of(*session.model, session.engine)) {
          EXPECT_TRUE(torch::allclose(weight, expected.at(name), 2e-5, 2e-5)) << name << ", stage " << stage;
        }
      });
    }
  }
}

TEST(Engine, TrainsTwoModelsAgainstEachOther) {
  run_ranks(2, [](const World& world) {
    Session one(world, 3), other(world, 3);
    for (int step = 0; step < 3; ++step) {
      const Tensor loss =
          one.loss(step) + 0.1 * other.loss(step) + (one.model->norm->bias * other.model->norm->bias).sum();
      loss.backward();
      EXPECT_TRUE(one.engine.step().applied());
      EXPECT_TRUE(other.engine.step().applied());
    }
  });
}

TEST(Engine, TellsTheOthersWhenARankFails) {
  const auto errors = errors_of_ranks(3, [](const World& world) {
    Session session(world);
    session.step(0);
    if (world.rank == 1) throw std::runtime_error("bad batch");
    session.step(1);
  });
  EXPECT_EQ(errors[1], "bad batch");
  for (int r : {0, 2}) EXPECT_TRUE(contains(errors[r], "rank 1 has ended training at step 1")) << errors[r];
}

TEST(Engine, TellsRanksThatDoDifferentThings) {
  const auto errors = errors_of_ranks(2, [](const World& world) {
    Session session(world);
    session.engine.backward(session.loss(0));
    world.rank == 0 ? (void)session.engine.step() : (void)session.engine.module_state_dict();
  });
  for (const auto& error : errors) {
    EXPECT_TRUE(contains(error, "rank 0 called step(), rank 1 called module_state_dict()")) << error;
  }
}

TEST(Engine, KeepsGatheredBytesWithinTheTwoLargestUnitsAndShardsTheRest) {
  for (int size : {2, 4}) {
    run_ranks(size, [&](const World& world) {
      TinyModel model = make_tiny();
      const std::string live = R"(, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0,
                                   "stage3_max_live_parameters": 0, "reduce_bucket_size": 1300}})";
      std::string text = R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"})" + live;
      Engine engine = engine_of(*model, world, apart(Config::from_text(text)));
      const auto [tokens, targets] = batch_of(0, kMicro);
      engine.backward(model(tokens, targets));
      engine.step();
      // The largest parameters are up and down of a block, 1200 elements; a unit holds 1300 at most and padding.
      EXPECT_LE(engine.peak_gathered_bytes(), 2 * 4 * (1300 + 64 * size));
      EXPECT_GT(engine.peak_gathered_bytes(), 0);
      int64_t total = 0;
      for (const auto& item : model->named_parameters())
        total += item.key() == "head.weight" ? 0 : item.value().numel();
      const MemoryLine parameters = engine.memory().front();
      EXPECT_EQ(parameters.role, MemoryRole::parameters);
      EXPECT_EQ(parameters.measured_bytes, parameters.predicted_bytes);
      EXPECT_GE(parameters.measured_bytes, 4 * total / size);
      EXPECT_LE(parameters.measured_bytes, 4 * total / size + 64 * 30) << "a cache line per parameter and unit";
      engine.empty_partition_cache();
      EXPECT_EQ(engine.live_gathered_bytes(), 0);
    });
  }
}

TEST(Engine, TakesOverWhatTheUserWritesUnderNoGrad) {
  std::map<int, Weights> by_stage;
  for (int stage = 0; stage < 4; ++stage) {
    run_ranks(2, [&](const World& world) {
      Session session(world, stage, 1, /*bf16=*/true);
      session.step(0);
      {
        torch::NoGradGuard no_grad;
        session.model->norm->weight.fill_(0.5);
        session.model->embed->weight.mul_(0.25);
      }
      session.step(1);
      const Weights weights = weights_of(*session.model, session.engine);
      EXPECT_LT((weights.at("norm.weight") - 0.5).abs().max().item<double>(), 0.03)
          << "one step away from what was written";
      if (world.rank == 0) by_stage[stage] = weights;
    });
    for (const auto& [name, weight] : by_stage[0]) EXPECT_TRUE(torch::equal(weight, by_stage[stage][name])) << name;
  }
}

TEST(Engine, HasWholeGradientsBetweenBackwardAndStep) {
  for (int stage : {1, 3}) {
    run_ranks(2, [&](const World& world) {
      Session session(world, stage);
      session.engine.backward(session.model->norm->bias.sum() * (world.rank + 1.0));
      const Tensor gradient = session.engine.full_state("norm.bias", "gradient");
      ASSERT_TRUE(gradient.defined());
      EXPECT_TRUE(torch::equal(gradient, torch::full({kWidth}, 1.5f))) << "the mean of 1 and 2";
      session.engine.zero_grad();
      EXPECT_TRUE(session.step(0).applied());
    });
  }
}

TEST(Engine, GivesBackEveryParameterAndItsTwins) {
  run_ranks(2, [](const World& world) {
    Session session(world);
    std::map<std::string, Tensor> state;
    for (const auto& item : session.engine.module_state_dict()) state[item.name] = item.tensor;
    TinyModel twin = make_tiny();
    for (const auto& item : twin->named_parameters())
      EXPECT_TRUE(torch::equal(state.at(item.key()), item.value())) << item.key();
    EXPECT_EQ(state.count("head.weight"), 1u);
  });
}

TEST(Engine, MovesWithItsModel) {
  run_ranks(2, [](const World& world) {
    Session session(world);
    Engine moved = std::move(session.engine);
    moved.backward(session.loss(0));
    EXPECT_TRUE(moved.step().applied());
  });
}

TEST(Engine, MakesRoomBetweenTwoStepsAndGoesOnWithTheSameBits) {
  run_ranks(2, [](const World& world) {
    Session straight(world, 2), phased(world, 2);
    for (int step = 0; step < 3; ++step) {
      straight.step(step);
      phased.step(step);
      phased.engine.offload_states({.folders = {testing::TempDir()}});
      phased.engine.backward(phased.loss(step + 1));
      EXPECT_THROW(phased.engine.step(), c10::ValueError);
      phased.engine.reload_states();
      phased.engine.zero_grad();
    }
    const Weights expected = weights_of(*straight.model, straight.engine);
    for (const auto& [name, weight] : weights_of(*phased.model, phased.engine)) {
      EXPECT_TRUE(torch::equal(weight, expected.at(name))) << name;
    }
    EXPECT_THROW(phased.engine.reload_states(), c10::ValueError);
  });
}

/// Bytes that this process has mapped and touched.
int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(Engine, ReturnsItsMemory) {
#ifdef DEEPTIDE_SANITIZED
  GTEST_SKIP() << "sanitizers keep freed memory, and their shadow of it";
#endif
  static constexpr int64_t kRows = 1024, kCopy = kRows * kRows * 4;  // one copy of the parameters: 4 MiB
  for (const Ranks ranks : {Ranks::apart, Ranks::together}) {
    std::vector<int64_t> resident;
    for (int cycle = 0; cycle < 6; ++cycle) {
      run_ranks(2, [&](const World& world) {
        torch::nn::Linear model = make_seeded([] { return torch::nn::Linear(kRows, kRows); });
        Engine engine = engine_of(*model, world, config_of(3, kMicro, 1, false, ranks));
        engine.backward(model(torch::ones({kMicro, kRows})).square().mean());
        EXPECT_TRUE(engine.step().applied());
      });
      resident.push_back(resident_bytes());
    }
    // Two ranks hold a dozen copies while they train; the first cycles fill torch's and malloc's own caches.
    EXPECT_LT(resident[5] - resident[2], kCopy) << "grew over three cycles from " << resident[2];
  }
}

}  // namespace
}  // namespace deeptide
