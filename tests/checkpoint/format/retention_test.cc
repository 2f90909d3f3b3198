// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Old checkpoints go, and nothing else does.
#include "checkpoint/format/retention.h"

#include <ATen/ops/zeros.h>

#include <set>

#include "checkpoint/scratch.h"

namespace deeptide::checkpoint {
namespace {

void save_steps(const Scratch& scratch, const std::vector<std::string>& tags, const Retention& retention) {
  for (const std::string& tag : tags) {
    save(scratch.path(), tag, {whole("w", "param", at::zeros({3}))});
    retain({scratch.path(), tag, kNonce}, retention);
  }
}

std::set<std::string> names_in(const Scratch& scratch) {
  const auto names = list_folder(scratch.path());
  return {names.begin(), names.end()};
}

TEST(Retention, KeepsTheLastAndEveryMultiple) {
  Scratch scratch;
  std::vector<std::string> tags;
  for (int step = 5; step <= 60; step += 5) tags.push_back("global_step" + std::to_string(step));
  save_steps(scratch, tags, {.keep_last = 2, .keep_every = 20});
  const std::set<std::string> expected = {"latest", "global_step20", "global_step40", "global_step55", "global_step60"};
  EXPECT_EQ(names_in(scratch), expected);
}

TEST(Retention, KeepsAllUnlessAsked) {
  Scratch scratch;
  save_steps(scratch, {"global_step1", "global_step2", "global_step3"}, {});
  save_steps(scratch, {"global_step4"}, {.keep_last = 0, .keep_every = 2});
  EXPECT_EQ(names_in(scratch).size(), 5u);
}

TEST(Retention, LeavesTagsAndFoldersThatAreNotItsOwn) {
  Scratch scratch;
  save(scratch.path(), "best", {whole("w", "param", at::zeros({3}))});
  for (const char* name : {"global_step1", "global_step2x", "notes", "global_step.0123.tmp"}) {
    make_folders(scratch / name);
  }
  save_steps(scratch, {"global_step3", "global_step4"}, {.keep_last = 1});
  const std::set<std::string> expected = {"latest", "best",         "global_step1",        "global_step2x",
                                          "notes",  "global_step4", "global_step.0123.tmp"};
  EXPECT_EQ(names_in(scratch), expected);
}

TEST(Retention, KeepsWhatLatestNames) {
  Scratch scratch;
  save_steps(scratch, {"global_step1"}, {});
  write_rank(scratch.path(), "global_step2", 0, {}, "{}");
  commit(scratch.path(), "global_step2", {}, /*save_latest=*/false);
  retain({scratch.path(), "global_step2", kNonce}, {.keep_last = 1});
  EXPECT_TRUE(names_in(scratch).contains("global_step1"));
  EXPECT_EQ(latest_tag(scratch.path()), "global_step1");
}

TEST(Retention, RemovesWhatCrashedSavesOfOtherStepsLeft) {
  Scratch scratch;
  write_rank({scratch.path(), "global_step7", kNonce + 1}, {0, {on_data_axis(0), "{}"}, {}});
  write_rank({scratch.path(), "best", kNonce + 1}, {0, {on_data_axis(0), "{}"}, {}});
  save_steps(scratch, {"global_step8"}, {.keep_last = 1});
  const std::set<std::string> expected = {"latest", "global_step8", "best." + nonce_text(kNonce + 1) + ".tmp"};
  EXPECT_EQ(names_in(scratch), expected);
}

}  // namespace
}  // namespace deeptide::checkpoint
