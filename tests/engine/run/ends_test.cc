// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Programs that end while they hold an engine: the exit code is theirs, and they print nothing.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "checkpoint/format/contents.h"
#include "checkpoint/format/file_io.h"
#include "deeptide/engine.h"
#include "engine/models.h"
#include "processes.h"
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

/// Each rank's file takes a while.
int write_slowly(const char*, const std::string& path) {
  if (path.ends_with(".safetensors")) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  return 0;
}

/// Two processes call std::exit as a save begins. The code tells whether it stands.
[[noreturn]] void exit_beside_a_save() {
  const std::string folder = testing::TempDir() + "deeptide_ends_" + std::to_string(::getpid());
  bool ended = true;
  {
    RankProcesses ranks(2, [&](const World& world) {
      checkpoint::refuse_with(&write_slowly);
      TinyModel model = make_tiny();
      Engine engine = engine_of(*model, world, config_of(2));
      const auto [tokens, targets] = batch_of(0, 2);
      engine.backward(model(tokens, targets));
      engine.step();
      engine.save_checkpoint(folder, "last", "{}", {.blocking = false});
      std::exit(0);
    });
    for (const auto& outcome : ranks.wait(std::chrono::seconds(60))) {
      ended = ended && outcome.ended_in_time && outcome.error.empty();
    }
  }
  const bool stands = checkpoint::latest_tag(folder) == "last" && checkpoint::exists(folder + "/last");
  std::filesystem::remove_all(folder);
  std::exit(ended ? stands ? 0 : 1 : 2);
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
TEST_F(Ends, ByExitBesideASave) { EXPECT_EXIT(exit_beside_a_save(), testing::ExitedWithCode(0), ""); }
TEST_F(Ends, AfterRanksAsThreads) { EXPECT_EXIT(end_beside_ranks_that_train(), testing::ExitedWithCode(0), ""); }

}  // namespace
}  // namespace deeptide
