// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Saves beside training: they hold the state of their call, bit for bit, and their failures leave training alone.
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <thread>

#include "checkpoint/format/file_io.h"
#include "checkpoint/load/reader.h"
#include "engine/session.h"
#include "ranks.h"

namespace deeptide::async_save_test {
namespace {

namespace fs = std::filesystem;
using at::Tensor;
using std::chrono::milliseconds;

/// Holds all writers of shards where they begin, until it is opened; and makes one file's writes fail.
struct Disk {
  Disk() { checkpoint::refuse_with(&Disk::answer); }
  ~Disk() {
    is_open = true;
    checkpoint::refuse_with(nullptr);
  }
  static int answer(const char* action, const std::string& path) {
    const bool is_shard = path.ends_with(".safetensors");
    while (is_shard && !is_open) std::this_thread::sleep_for(milliseconds(1));
    const char* name = full;
    return name != nullptr && path.ends_with(name) && std::string(action) == "write" ? ENOSPC : 0;
  }
  static inline std::atomic<bool> is_open = true;
  static inline std::atomic<const char*> full = nullptr;  // a file's name; ranks set it alike
};

struct Folder {
  Folder()
      : path(fs::path(testing::TempDir()) /
             ("deeptide_async_" + std::to_string(::getpid()) + "_" + std::to_string(number++))) {}
  ~Folder() { fs::remove_all(path); }
  static inline int number = 0;
  const fs::path path;
};

struct Setting {
  int stage;
  const char* dtype;      // "bf16", "fp16", "" for fp32
  const char* placement;  // "", "cpu", "nvme"
  bool packed = false;
  const char* optimizer = "AdamW";
};

Config config_of(const Setting& setting, const std::string& folder, const std::string& checkpoint = "{}") {
  std::string zero = "\"stage\": " + std::to_string(setting.stage) + ", \"stage3_param_persistence_threshold\": 0";
  if (*setting.placement) {
    zero += std::string(R"(, "offload_optimizer": {"device": ")") + setting.placement + "\", \"nvme_path\": \"" +
            folder + "\"}";
  }
  std::string text = R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": ")" +
                     std::string(setting.optimizer) + R"(", "params": {"lr": 0.01}}, "zero_optimization": {)" + zero +
                     R"(}, "checkpoint": )" + checkpoint + R"(, "deeptide": {"comm_timeout": 60, "packed_states": )" +
                     (setting.packed ? "true" : "false") + "}";
  // The scale is low enough that each step is applied.
  const bool scaled = std::string(setting.dtype) == "fp16";
  const std::string scale = scaled ? R"(, "initial_scale_power": 4)" : "";
  if (*setting.dtype) text += ", \"" + std::string(setting.dtype) + "\": {\"enabled\": true" + scale + "}";
  return Config::from_text(text + "}");
}

void train(TrainingSession& session, int64_t first, int64_t count) {
  for (int64_t step = first; step < first + count; ++step) session.step(step);
}

/// The steps' outcomes until one says how the save ended.
StepOutcome outcome_of_save(TrainingSession& session, int64_t step) {
  for (;; ++step) {
    StepOutcome outcome = session.step(step);
    if (!outcome.saved.empty() || !outcome.save_error.empty()) return outcome;
    std::this_thread::sleep_for(milliseconds(2));
  }
}

class AsyncSaves : public testing::TestWithParam<std::tuple<int, Setting>> {};

TEST_P(AsyncSaves, HoldTheStateOfTheirCall) {
  const auto& [size, setting] = GetParam();
  const Folder folder;
  fs::create_directories(folder.path / "nvme");
  const Config config = config_of(setting, folder.path / "nvme");
  const Disk disk;
  Disk::is_open = true;
  std::atomic<int> ready = 0;
  run_ranks(size, [&, size = size](const World& world) {
    TrainingSession session(world, 1, config);
    train(session, 0, 2);
    session.engine.save_checkpoint(folder.path, "blocking");
    if (++ready == size) Disk::is_open = false;
    while (ready < size) std::this_thread::yield();
    session.engine.save_checkpoint(folder.path, "beside", "{}", {.blocking = false});
    train(session, 2, 2);  // before the writer has read anything
    EXPECT_FALSE(fs::exists(folder.path / "beside"));
    Disk::is_open = true;
    EXPECT_EQ(session.engine.wait_for_save(), folder.path / "beside");
    train(session, 4, 1);
    std::vector<std::vector<Tensor>> resumed;
    for (const char* tag : {"blocking", "beside"}) {
      TrainingSession again(world, 1, config);
      EXPECT_TRUE(again.engine.load_checkpoint(folder.path, tag));
      train(again, 2, 3);
      resumed.push_back(again.results());
    }
    expect_equal_results(resumed[1], resumed[0]);
    const auto straight = session.results();
    expect_equal_results({straight.end() - static_cast<ptrdiff_t>(resumed[0].size()), straight.end()}, resumed[0]);
  });
}

constexpr Setting kSettings[] = {{0, "", ""},
                                 {1, "", ""},
                                 {2, "bf16", ""},
                                 {3, "bf16", ""},
                                 {3, "", ""},
                                 {1, "bf16", "", true},
                                 {2, "fp16", "cpu"},
                                 {1, "", "nvme"},
                                 {3, "bf16", "nvme"},
                                 {3, "bf16", "nvme", true},
                                 {0, "bf16", "", false, "Lamb"},
                                 {2, "", "", false, "Muon"},
                                 {0, "fp16", "", false, "OneBitAdam"}};

std::string name_of(const testing::TestParamInfo<AsyncSaves::ParamType>& info) {
  const auto& [size, setting] = info.param;
  return "Ranks" + std::to_string(size) + "Stage" + std::to_string(setting.stage) + setting.dtype + setting.placement +
         (setting.packed ? "packed" : "") + setting.optimizer;
}

INSTANTIATE_TEST_SUITE_P(Settings, AsyncSaves, testing::Combine(testing::Values(1, 2), testing::ValuesIn(kSettings)),
                         name_of);

TEST(AsyncSave, FailsInTheNextOutcomeNamingRankAndFile) {
  const Folder folder;
  const Config config = config_of({1, "bf16", ""}, folder.path, R"({"async": true})");
  const Disk disk;
  run_ranks(2, [&](const World& world) {
    TrainingSession session(world, 1, config);
    train(session, 0, 1);
    session.engine.save_checkpoint(folder.path, "good");
    EXPECT_EQ(outcome_of_save(session, 1).saved, folder.path / "good");
    Disk::full = "rank_00001.safetensors";
    session.engine.save_checkpoint(folder.path, "bad");
    const StepOutcome outcome = outcome_of_save(session, 20);
    EXPECT_TRUE(outcome.applied());
    EXPECT_TRUE(outcome.save_error.find("rank 1: cannot write") == 0) << outcome.save_error;
    EXPECT_NE(outcome.save_error.find("rank_00001.safetensors: No space left on device; free some"), std::string::npos)
        << outcome.save_error;
    session.engine.save_checkpoint(folder.path, "bad");
    EXPECT_THROW(session.engine.wait_for_save(), CheckpointError);
    Disk::full = nullptr;
    session.engine.save_checkpoint(folder.path, "next");
    EXPECT_EQ(session.engine.wait_for_save(), folder.path / "next");
    EXPECT_EQ(session.engine.wait_for_save(), "");
  });
  std::vector<std::string> names;
  for (const auto& item : fs::directory_iterator(folder.path)) names.push_back(item.path().filename());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"good", "latest", "next"}));
}

/// Counts what saves ask of the kernel and refuses one such request; -1: none.
struct OneRefusal {
  OneRefusal(int request, int code) {
    count = 0;
    refused = request;
    error = code;
    path.clear();
    checkpoint::refuse_with(&OneRefusal::answer);
  }
  ~OneRefusal() { checkpoint::refuse_with(nullptr); }
  static int answer(const char*, const std::string& asked) {
    if (count++ != refused) return 0;
    path = asked;  // one thread only comes here
    return error;
  }
  static inline std::atomic<int> count = 0;
  static inline int refused = -1, error = 0;
  static inline std::string path;
};

/// The error of a save beside training: of the call, or of a later step, which is applied all the same.
std::string error_of_save(TrainingSession& session, const std::string& folder, int64_t step) {
  try {
    session.engine.save_checkpoint(folder, "bad");
  } catch (const CheckpointError& error) {
    EXPECT_TRUE(session.step(step).applied());
    return error.what();
  }
  const StepOutcome outcome = outcome_of_save(session, step);
  EXPECT_TRUE(outcome.applied());
  return outcome.save_error;
}

/// A save of the same tag beside training fails at each of its requests: the one before stays, and so does the run.
class AsyncSaveFaults : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(AsyncSaveFaults, LoseNothingWhateverRequestFails) {
  const auto [size, parts] = GetParam();
  const Folder folder, drives;
  const std::string list = R"("folders": [")" + (drives.path / "a").string() + R"(", ")" + (drives.path / "b").string();
  const Config config =
      config_of({1, "bf16", ""}, folder.path, R"({"async": true)" + (parts ? ", " + list + "\"]}" : "}"));
  std::atomic<int> requests = 0;
  run_ranks(size, [&](const World& world) {
    TrainingSession session(world, 1, config);
    train(session, 0, 1);
    std::unique_ptr<OneRefusal> refusal;
    const auto refuse = [&](int request, int error) {
      session.step(1);                       // all ranks are here, and no save is under way
      if (world.rank == 0) refusal.reset();  // first: its end lets all through
      if (world.rank == 0) refusal = std::make_unique<OneRefusal>(request, error);
      session.step(1);
    };
    refuse(-1, 0);
    session.engine.save_checkpoint(folder.path, "bad");
    session.engine.wait_for_save();
    if (world.rank == 0) requests = OneRefusal::count.load();
    session.step(1);
    EXPECT_GE(requests, 8);  // a shard's blocks, tables, the manifest, the moves, `latest`
    int refused = 0;
    for (const int error : {ENOSPC, EIO}) {
      for (int request = 0; request < requests; ++request) {
        refuse(request, error);
        const std::string text = error_of_save(session, folder.path, 1);
        session.step(1);
        if (OneRefusal::path.empty()) continue;  // this save asked for less: the moves of a tag that is there
        ++refused;
        EXPECT_NE(text.find(std::strerror(error)), std::string::npos) << request << ": " << text;
        EXPECT_NE(text.find(OneRefusal::path), std::string::npos) << request << ": " << text;
        TrainingSession again(world, 1, config);
        EXPECT_TRUE(again.engine.load_checkpoint(folder.path)) << request;
      }
    }
    EXPECT_GE(refused, 2 * requests - 4);
    refuse(-1, 0);
    session.engine.save_checkpoint(folder.path, "bad");
    EXPECT_EQ(session.engine.wait_for_save(), folder.path / "bad");
  });
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path), {}), 2);  // one checkpoint and `latest`
}

INSTANTIATE_TEST_SUITE_P(Ranks, AsyncSaveFaults, testing::Combine(testing::Values(1, 2), testing::Bool()));

TEST(AsyncSave, IsFinishedByTheNextSaveALoadAndTheEnd) {
  const Folder folder;
  const Config config = config_of({2, "bf16", ""}, folder.path, R"({"writer": {"decoupled": true}})");
  const Disk disk;
  run_ranks(2, [&](const World& world) {
    TrainingSession session(world, 1, config);
    train(session, 0, 1);
    session.engine.save_checkpoint(folder.path, "first");
    session.engine.save_checkpoint(folder.path, "second");
    EXPECT_TRUE(fs::exists(folder.path / "first"));
    EXPECT_TRUE(session.engine.load_checkpoint(folder.path));
    EXPECT_TRUE(fs::exists(folder.path / "second"));
    train(session, 1, 1);
    session.engine.save_checkpoint(folder.path, "third");
  });
  EXPECT_EQ(checkpoint::latest_tag(folder.path), "third");
  EXPECT_NO_THROW(checkpoint::Reader(folder.path, "third"));
}

TEST(AsyncSave, StaysWithinItsMemory) {
  const Folder folder;
  const Config config = config_of({1, "bf16", ""}, folder.path, R"({"async": true, "snapshot_bytes": 1})");
  const Disk disk;
  run_ranks(2, [&](const World& world) {
    TrainingSession session(world, 1, config);
    train(session, 0, 1);
    session.engine.save_checkpoint(folder.path, "a", "{}", {.blocking = true});
    session.engine.save_checkpoint(folder.path, "b");
    train(session, 1, 2);  // each unit waits for the writer
    session.engine.wait_for_save();
    TrainingSession one(world, 1, config), other(world, 1, config);
    one.engine.load_checkpoint(folder.path, "a");
    other.engine.load_checkpoint(folder.path, "b");
    expect_equal_results(other.results(), one.results());
  });
}

TEST(AsyncSave, MustBeAskedForByAllRanks) {
  const Folder folder;
  const auto errors = errors_of_ranks(2, [&](const World& world) {
    TrainingSession session(world, 1, config_of({1, "", ""}, folder.path));
    train(session, 0, 1);
    session.engine.save_checkpoint(folder.path, "t", "{}", {.blocking = world.rank == 0});
  });
  for (const std::string& error : errors) EXPECT_NE(error.find("some ranks were given blocking=true"), error.npos);
}

TEST(AsyncSave, RefusesABadTagAtOnce) {
  const Folder folder;
  run_ranks(2, [&](const World& world) {
    TrainingSession session(world, 1, config_of({1, "", ""}, folder.path, R"({"async": true})"));
    train(session, 0, 1);
    EXPECT_THROW(session.engine.save_checkpoint(folder.path, "../up"), CheckpointError);
    train(session, 1, 1);
  });
}

}  // namespace
}  // namespace deeptide::async_save_test
