// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Saves where each host has a folder of its own, and loads on other ranks, other hosts and after a run that died.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "checkpoint/scratch.h"
#include "engine/session.h"
#include "errors.h"
#include "on_hosts.h"

namespace deeptide {
namespace {

namespace fs = std::filesystem;
using checkpoint::Scratch;

Config local_config(int stage, bool is_local = true, const std::string& more = "") {
  return Config::from_text(R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"},
      "zero_optimization": {"stage": )" +
                           std::to_string(stage) + R"(, "stage3_param_persistence_threshold": 0},
      "checkpoint": {"use_node_local_storage": )" +
                           (is_local ? "true" : "false") + more + R"(}, "deeptide": {"comm_timeout": 60}})");
}

/// Folders of hosts, and the host of each rank.
struct Hosts {
  std::vector<int> of_ranks;
  const Scratch& scratch;

  std::string folder(int rank) const { return scratch / std::to_string(of_ranks[rank]); }
  void run(int stage, const std::function<void(TrainingSession&, const std::string&)>& work,
           const std::string& more = "") const {
    run_on_hosts(of_ranks, [&](const World& world) {
      TrainingSession session(world, 1, local_config(stage, true, more));
      work(session, folder(world.rank));
    });
  }
};

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

/// All masters and moments, whole.
std::vector<at::Tensor> states_of(TrainingSession& session) {
  std::vector<at::Tensor> states;
  for (const auto& item : session.model->named_parameters()) {
    for (const char* role : {"master", "exp_avg", "exp_avg_sq"}) {
      states.push_back(session.engine.full_state(item.key(), role));
    }
  }
  return states;
}

/// Trains two steps on two hosts of two ranks, saves, and returns the states.
std::vector<at::Tensor> save_on_two_hosts(const Scratch& scratch, int stage, const std::string& tag = "") {
  std::vector<at::Tensor> states;
  Hosts{{0, 0, 1, 1}, scratch}.run(stage, [&](TrainingSession& session, const std::string& folder) {
    session.step(0);
    session.step(1);
    session.engine.save_checkpoint(folder, tag);
    auto own = states_of(session);
    if (session.world.rank == 0) states = std::move(own);
  });
  return states;
}

class NodeLocal : public testing::TestWithParam<int> {};

TEST_P(NodeLocal, EachHostKeepsItsRanksFilesAndGoesOnBitForBit) {
  const Scratch scratch;
  save_on_two_hosts(scratch, GetParam());
  EXPECT_EQ(names_in(scratch / "0/global_step2"),
            (std::vector<std::string>{"manifest.json", "rank_00000.safetensors", "rank_00001.safetensors"}));
  EXPECT_EQ(names_in(scratch / "1/global_step2"),
            (std::vector<std::string>{"manifest.json", "rank_00002.safetensors", "rank_00003.safetensors"}));
  Hosts{{0, 0, 1, 1}, scratch}.run(GetParam(), [&](TrainingSession& resumed, const std::string& folder) {
    TrainingSession straight(resumed.world, 1, local_config(GetParam()));
    straight.step(0);
    straight.step(1);
    ASSERT_TRUE(resumed.engine.load_checkpoint(folder));
    straight.seen.clear();
    resumed.step(2);
    straight.step(2);
    expect_equal_results(resumed.results(), straight.results());
  });
}

TEST_P(NodeLocal, OtherRanksAndHostsAskForWhatTheyLack) {
  const Scratch scratch;
  const auto saved = save_on_two_hosts(scratch, GetParam());
  // Hosts that changed places; three hosts, of which one is new; fewer ranks; more ranks than before.
  for (const auto& hosts : {std::vector<int>{1, 1, 0, 0}, {2, 0, 1}, {1, 0}, {0, 1, 0, 1, 2, 2}}) {
    Hosts{hosts, scratch}.run(GetParam(), [&](TrainingSession& session, const std::string& folder) {
      ASSERT_TRUE(session.engine.load_checkpoint(folder));
      EXPECT_EQ(session.engine.global_steps(), 2);
      expect_equal_results(states_of(session), saved);
    });
  }
}

TEST_P(NodeLocal, SavesBesideTrainingHoldTheStateOfTheirCall) {
  const Scratch scratch;
  const Hosts hosts{{0, 1, 1, 0}, scratch};
  std::vector<at::Tensor> saved;
  hosts.run(GetParam(), [&](TrainingSession& session, const std::string& folder) {
    session.step(0);
    auto states = states_of(session);
    if (session.world.rank == 0) saved = std::move(states);
    session.engine.save_checkpoint(folder, "first", "{}", {.blocking = false});
    StepOutcome outcome;
    for (int step = 1; outcome.saved.empty() && outcome.save_error.empty(); ++step) outcome = session.step(step);
    EXPECT_EQ(outcome.saved, folder + "/first") << outcome.save_error;
    session.engine.save_checkpoint(folder, "waited for", "{}", {.blocking = false});
    EXPECT_EQ(session.engine.wait_for_save(), folder + "/waited for");
    session.engine.save_checkpoint(folder, "at the end", "{}", {.blocking = false});
  });
  for (const char* host : {"0", "1"}) {
    EXPECT_EQ(names_in(scratch / host), (std::vector<std::string>{"at the end", "first", "latest", "waited for"}));
    for (const char* tag : {"/first", "/waited for", "/at the end"}) {
      EXPECT_EQ(names_in(scratch / host + tag).size(), 3u) << "a manifest and the shards of two ranks";
    }
  }
  Hosts{{1, 0}, scratch}.run(GetParam(), [&](TrainingSession& session, const std::string& folder) {
    ASSERT_TRUE(session.engine.load_checkpoint(folder, "first"));
    expect_equal_results(states_of(session), saved);
    ASSERT_TRUE(session.engine.load_checkpoint(folder));
  });
}

TEST_P(NodeLocal, CutsShardsOverTheDrivesOfEachHost) {
  const Scratch scratch;
  std::vector<at::Tensor> saved[2];  // beside training, blocking
  // Hosts have drives of the same names in life; here one folder holds the parts of both.
  const std::string folders = R"(, "folders": [")" + (scratch / "drive0") + R"(", ")" + (scratch / "drive1") + R"("])";
  for (const bool blocking : {true, false}) {
    const auto save = [&](TrainingSession& session, const std::string& folder) {
      session.step(0);
      session.engine.save_checkpoint(folder, "t", "{}", {.blocking = blocking});
      session.step(1);
      session.step(2);
      session.engine.wait_for_save();
    };
    Hosts{{0, 0, 1}, scratch}.run(GetParam(), save, folders);
    Hosts{{1, 0}, scratch}.run(GetParam(), [&](TrainingSession& session, const std::string& folder) {
      ASSERT_TRUE(session.engine.load_checkpoint(folder));
      EXPECT_EQ(session.engine.global_steps(), 1);
      auto states = states_of(session);
      if (session.world.rank == 0) saved[blocking] = std::move(states);
    });
    EXPECT_TRUE(fs::is_symlink(scratch / "1/t/rank_00002-1.safetensors"));
  }
  expect_equal_results(saved[false], saved[true]);
}

INSTANTIATE_TEST_SUITE_P(Stages, NodeLocal, testing::Values(0, 1, 3));

TEST(NodeLocalCheckpoint, AllHostsFilesInOneFolderAreACheckpointLikeAnyOther) {
  const Scratch scratch;
  const auto saved = save_on_two_hosts(scratch, 3);
  fs::copy(scratch / "1", scratch / "0", fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  run_ranks(1, [&](const World& world) {
    TrainingSession session(world, 1, local_config(0, /*is_local=*/false));
    ASSERT_TRUE(session.engine.load_checkpoint(scratch / "0"));
    expect_equal_results(states_of(session), saved);
  });
}

TEST(NodeLocalCheckpoint, ARunThatDiedBetweenTwoHostsCommitsGoesOnFromTheSaveBefore) {
  const Scratch scratch;
  const auto saved = save_on_two_hosts(scratch, 1, "before");
  Hosts{{0, 0, 1, 1}, scratch}.run(1, [&](TrainingSession& session, const std::string& folder) {
    ASSERT_TRUE(session.engine.load_checkpoint(folder));
    session.step(2);
    session.engine.save_checkpoint(folder, "after");
  });
  fs::remove_all(scratch / "1/after");  // it had not come so far there
  std::ofstream(scratch / "1/latest") << "before";
  Hosts{{0, 0, 1, 1}, scratch}.run(1, [&](TrainingSession& session, const std::string& folder) {
    const auto loaded = session.engine.load_checkpoint(folder);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(fs::path(loaded->path).filename(), "before");
    expect_equal_results(states_of(session), saved);
  });
}

TEST(NodeLocalCheckpoint, AFileThatNoHostHasOrThatIsDamagedIsNamed) {
  const Scratch scratch;
  save_on_two_hosts(scratch, 1);
  const auto errors_on = [&](const std::vector<int>& hosts) {
    std::vector<std::string> errors(hosts.size());
    Hosts{hosts, scratch}.run(1, [&](TrainingSession& session, const std::string& folder) {
      errors[session.world.rank] = error_of([&] { session.engine.load_checkpoint(folder); });
    });
    return errors;
  };
  for (const std::string& error : errors_on({0, 0})) {
    EXPECT_NE(error.find("no rank's host has rank_0000"), std::string::npos) << error;
  }
  std::fstream file(scratch / "1/global_step2/rank_00003.safetensors", std::ios::in | std::ios::out | std::ios::ate);
  file.seekp(-1, std::ios::end);
  file.put('\x7f');
  file.close();
  const auto errors = errors_on({0, 1});
  EXPECT_NE(errors[1].find("rank_00003.safetensors"), std::string::npos) << errors[1];
  EXPECT_NE(errors[0].find("failed on rank 1"), std::string::npos) << errors[0];
}

TEST(NodeLocalCheckpoint, AWriterThatFailsIsNamedAndNothingStays) {
  const Scratch scratch;
  const auto refuse = [](const char* action, const std::string& path) {
    return path.ends_with("rank_00002.safetensors") && std::string(action) == "write" ? ENOSPC : 0;
  };
  Hosts{{0, 0, 1, 1}, scratch}.run(1, [&](TrainingSession& session, const std::string& folder) {
    session.step(0);
    session.engine.save_checkpoint(folder, "good");
    checkpoint::refuse_with(refuse);
    session.engine.save_checkpoint(folder, "bad", "{}", {.blocking = false});
    const std::string error = error_of([&] { session.engine.wait_for_save(); });
    EXPECT_NE(error.find("rank 2: cannot write"), std::string::npos) << error;
    checkpoint::refuse_with(nullptr);
    session.step(1);
    ASSERT_TRUE(session.engine.load_checkpoint(folder));
    EXPECT_EQ(session.engine.global_steps(), 1);
  });
  for (const char* host : {"0", "1"}) {
    EXPECT_EQ(names_in(scratch / host), (std::vector<std::string>{"good", "latest"}));
  }
}

// A rank's own counters and what its program adds may differ from rank 0's, which is what a checkpoint holds.
TEST(NodeLocalCheckpoint, HoldsTheFirstRanksClientStateOnEachHost) {
  for (const bool blocking : {true, false}) {
    const Scratch scratch;
    Hosts{{0, 0, 1, 1}, scratch}.run(1, [&](TrainingSession& session, const std::string& folder) {
      session.step(0);
      const std::string own = R"({"rank": )" + std::to_string(session.world.rank) + "}";
      session.engine.save_checkpoint(folder, "t", own, {.blocking = blocking});
      session.engine.wait_for_save();
      const auto loaded = session.engine.load_checkpoint(folder, "t");
      ASSERT_TRUE(loaded);
      EXPECT_EQ(loaded->client_state_json, R"({"rank": 0})");
    });
  }
}

TEST(NodeLocalCheckpoint, ASharedFolderIsSavedOnce) {
  const Scratch scratch;
  Hosts{{0, 0, 0}, scratch}.run(2, [&](TrainingSession& session, const std::string& folder) {
    session.step(0);
    session.engine.save_checkpoint(folder);
    ASSERT_TRUE(session.engine.load_checkpoint(folder));
  });
  EXPECT_EQ(names_in(scratch / "0"), (std::vector<std::string>{"global_step1", "latest"}));
}

}  // namespace
}  // namespace deeptide
