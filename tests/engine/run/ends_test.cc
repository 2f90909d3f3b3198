// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Programs that end while they hold an engine: the exit code is theirs, and they print nothing.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "deeptide/engine.h"
#include "engine/models.h"
#include "ranks.h"

namespace deeptide {
namespace {

struct Program {
  explicit Program(int stage) : engine(engine_of(*model, alone(), config_of(stage))) {
    for (int step = 0; step < 2; ++step) {
      const auto [tokens, targets] = batch_of(step, 2);
      engine.backward(model(tokens, targets));
      engine.step();
    }
  }
  static World alone() { return make_world(c10::make_intrusive<c10d::HashStore>(), 0, 1); }
  TinyModel model = make_tiny();
  Engine engine;
};

[[noreturn]] void exit_deep_within(int code) {
  const Program on_the_stack(3);
  std::exit(code);
}

[[noreturn]] void end_with_a_static_engine(int code) {
  static const Program kept(2);  // destroyed beside libtorch's own statics
  std::exit(code);
}

[[noreturn]] void end_with_an_engine_that_nobody_destroys() {
  new Program(2);  // NOLINT(cppcoreguidelines-owning-memory)
  std::exit(0);
}

[[noreturn]] void end_beside_ranks_that_train() {
  run_ranks(2, [](const World& world) {
    TinyModel model = make_tiny();
    Engine engine = engine_of(*model, world, config_of(3));
    const auto [tokens, targets] = batch_of(0, 2);
    engine.backward(model(tokens, targets));
    engine.step();
  });
  std::exit(0);
}

class Ends : public testing::Test {
 protected:
  // Each in a process that begins anew: a forked one would lack this one's threads.
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(Ends, ByExitWithAnEngineOnTheStack) {
  EXPECT_EXIT(exit_deep_within(0), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(exit_deep_within(3), testing::ExitedWithCode(3), "");
}
TEST_F(Ends, WithAStaticEngine) { EXPECT_EXIT(end_with_a_static_engine(0), testing::ExitedWithCode(0), ""); }
TEST_F(Ends, WithAnEngineThatNobodyDestroys) {
  EXPECT_EXIT(end_with_an_engine_that_nobody_destroys(), testing::ExitedWithCode(0), "");
}
TEST_F(Ends, AfterRanksAsThreads) { EXPECT_EXIT(end_beside_ranks_that_train(), testing::ExitedWithCode(0), ""); }

}  // namespace
}  // namespace deeptide
