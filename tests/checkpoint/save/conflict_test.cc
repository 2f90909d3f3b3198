// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Saves of a tag that has a folder: the user's files stay, and two saves at once never mix.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>
#include <utility>

#include "checkpoint/save/user_files.h"
#include "checkpoint/scratch.h"

namespace deeptide::checkpoint {
namespace {

namespace fs = std::filesystem;
using at::Tensor;

constexpr int64_t kElements = 64;

Piece filled(const std::string& name, float value) {
  return whole(name, "param", at::full({kElements}, value, at::kFloat));
}

float saved_element(const std::string& directory, const std::string& name) {
  const Tensor back = at::zeros({kElements}, at::kFloat);
  Reader(directory, "t").read({whole(name, "param", back)});
  return back.const_data_ptr<float>()[kElements - 1];
}

// -- the user's files -------------------------------------------------------------------------------------------------

void make_user_files(const std::string& folder) {
  make_folders(folder + "/tokenizer/deep");
  write_text(folder + "/args.json", "{}");
  write_text(folder + "/rank_notes.txt", "not ours");
  write_text(folder + "/tokenizer/vocabulary", "a b c");
  write_text(folder + "/tokenizer/deep/merges", "d");
  ::chmod((folder + "/tokenizer").c_str(), 0700);
  fs::create_symlink("tokenizer/vocabulary", folder + "/link");
  fs::create_symlink("nowhere", folder + "/broken");
}

void expect_user_files(const std::string& folder) {
  EXPECT_EQ(read_text(folder + "/args.json"), "{}");
  EXPECT_EQ(read_text(folder + "/rank_notes.txt"), "not ours");
  EXPECT_EQ(read_text(folder + "/tokenizer/vocabulary"), "a b c");
  EXPECT_EQ(read_text(folder + "/tokenizer/deep/merges"), "d");
  EXPECT_EQ(fs::status(folder + "/tokenizer").permissions(), fs::perms(0700));
  EXPECT_EQ(fs::read_symlink(folder + "/link"), "tokenizer/vocabulary");
  EXPECT_EQ(fs::read_symlink(folder + "/broken"), "nowhere");
}

TEST(UserFiles, StayInTheFolderOfATagThatIsSavedAgain) {
  Scratch scratch;
  write_rank(scratch.path(), "t", 1, {filled("v", 0)}, "{}");
  write_rank(scratch.path(), "t", 0, {filled("w", 0)}, "{}");
  commit(scratch.path(), "t", {.world_size = 2}, true);
  make_user_files(scratch / "t");
  std::ofstream log(scratch / "t/metrics.jsonl");
  log << "1" << std::flush;
  for (int generation : {1, 2}) {
    save(scratch.path(), "t", {filled("w", static_cast<float>(generation))});
    expect_user_files(scratch / "t");
    EXPECT_EQ(saved_element(scratch.path(), "w"), static_cast<float>(generation));
  }
  EXPECT_FALSE(exists(scratch / "t/rank_00001.safetensors")) << "the shard of a larger world is ours";
  log << "2" << std::flush;
  EXPECT_EQ(read_text(scratch / "t/metrics.jsonl"), "12") << "a file that is open goes on";
  EXPECT_EQ(list_folder(scratch.path()).size(), 2u);
}

TEST(UserFiles, MayBeInAFolderThatTheUserMadeBefore) {
  Scratch scratch;
  make_user_files(scratch / "t");
  save(scratch.path(), "t", {filled("w", 1)});
  expect_user_files(scratch / "t");
  EXPECT_EQ(saved_element(scratch.path(), "w"), 1);
  make_folders(scratch / "empty");
  save(scratch.path(), "empty", {filled("w", 1)});
  EXPECT_TRUE(exists(scratch / "empty/manifest.json"));
}

TEST(UserFiles, StayWhenASaveFails) {
  Scratch scratch;
  make_user_files(scratch / "t");
  write_rank(scratch.path(), "t", 0, {filled("w", 1)}, "{}");
  error_of([&] { commit(scratch.path(), "t", {.world_size = 2}, true); });
  abandon(scratch.path(), "t");
  expect_user_files(scratch / "t");
  EXPECT_EQ(list_folder(scratch.path()).size(), 1u);
}

TEST(UserFiles, ThatACrashLeftAsideAreKept) {
  Scratch scratch;
  save(scratch.path(), "t", {filled("w", 1)});
  make_user_files(scratch / "t");
  fs::rename(scratch / "t", aside_path(scratch / "t"));
  save(scratch.path(), "t", {filled("w", 2)});
  expect_user_files(scratch / "t");
  EXPECT_EQ(saved_element(scratch.path(), "w"), 2);
  EXPECT_FALSE(exists(aside_path(scratch / "t")));
}

TEST(UserFiles, AreGivenToAFolderWithoutWhatItHas) {
  Scratch scratch;
  make_user_files(scratch / "from");
  write_text(scratch / "from/manifest.json", "old");
  make_folders(scratch / "to/tokenizer");
  write_text(scratch / "to/args.json", "new");
  keep_user_files(scratch / "from", scratch / "to");
  EXPECT_EQ(read_text(scratch / "to/args.json"), "new");
  EXPECT_EQ(read_text(scratch / "to/tokenizer/deep/merges"), "d");
  EXPECT_FALSE(exists(scratch / "to/manifest.json"));
  expect_user_files(scratch / "from");
}

// -- two jobs ---------------------------------------------------------------------------------------------------------

SaveTarget job(const std::string& directory, uint64_t nonce) { return {directory, "t", nonce}; }

void write_half(const SaveTarget& target, int rank, float value) {
  write_rank(target, {rank, {on_data_axis(rank), "{}"}, {filled("w" + std::to_string(rank), value)}});
}

// All orders of six calls: A and a are the ranks of one job, B and b of the other, X and Y their commits.
TEST(TwoJobs, NeverCommitAMixtureHoweverTheirWritesInterleave) {
  std::string calls = "ABXYab";
  int committed[2] = {0, 0};
  do {
    if (calls.find('X') < std::max(calls.find('A'), calls.find('a'))) continue;
    if (calls.find('Y') < std::max(calls.find('B'), calls.find('b'))) continue;
    Scratch scratch;
    write_half(job(scratch.path(), 3), 0, 0);
    write_half(job(scratch.path(), 3), 1, 0);
    commit(job(scratch.path(), 3), {.world_size = 2}, true);
    float expected = 0;  // of the last commit that worked
    const SaveTarget jobs[] = {job(scratch.path(), 1), job(scratch.path(), 2)};
    for (char call : calls) {
      const int number = std::string("AaX").find(call) != std::string::npos ? 0 : 1;
      const float value = static_cast<float>(number + 1);
      try {
        if (call == 'X' || call == 'Y') {
          commit(jobs[number], {.world_size = 2}, true);
          expected = value;
          ++committed[number];
        } else {
          write_half(jobs[number], call == 'A' || call == 'B' ? 0 : 1, value);
        }
      } catch (const CheckpointError& error) {
        EXPECT_TRUE(contains(error.what(), "does no other job save this tag?")) << error.what();
        abandon(jobs[number]);
      }
      ASSERT_EQ(saved_element(scratch.path(), "w0"), expected) << calls << " after " << call;
      ASSERT_EQ(saved_element(scratch.path(), "w1"), expected) << calls << " after " << call;
    }
    EXPECT_EQ(list_folder(scratch.path()).size(), 2u) << calls;
  } while (std::next_permutation(calls.begin(), calls.end()));
  EXPECT_GT(committed[0], 0);
  EXPECT_EQ(committed[0], committed[1]) << "the orders are symmetric";
}

TEST(TwoJobs, ThatShareAFolderByForceAreTold) {
  Scratch scratch;
  const SaveTarget one = job(scratch.path(), 1), other = job(scratch.path(), 2);
  write_half(one, 0, 1);
  write_half(one, 1, 1);
  write_half(other, 1, 2);
  fs::copy(growing_path(other), growing_path(one), fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  const std::string text = error_of([&] { commit(one, {.world_size = 2}, true); });
  EXPECT_TRUE(contains(text, "rank_00001.json is of save " + nonce_text(2) + ", expected " + nonce_text(1))) << text;
  EXPECT_FALSE(exists(scratch / "t"));
}

TEST(TwoJobs, SavingAgainAndAgainAtOnceLeaveAWholeCheckpoint) {
  Scratch scratch;
  const auto run = [&](float value) {
    int committed = 0;
    for (int i = 0; i < 60; ++i) {
      const SaveTarget target = job(scratch.path(), draw_nonce());
      try {
        write_half(target, 0, value);
        write_half(target, 1, value);
        commit(target, {.world_size = 2}, true);
        ++committed;
      } catch (const CheckpointError&) {
        abandon(target);
      }
    }
    return committed;
  };
  int committed[2] = {0, 0};
  std::thread first([&] { committed[0] = run(1); });
  std::thread second([&] { committed[1] = run(2); });
  first.join();
  second.join();
  EXPECT_GT(committed[0] + committed[1], 0);
  EXPECT_EQ(saved_element(scratch.path(), "w0"), saved_element(scratch.path(), "w1"));
}

/// The other job takes the folder while rank 1 writes, and rank 0 comes later and makes it again.
TEST(TwoJobs, DoNotCommitARankWhoseFilesWentWhileItWrote) {
  Scratch scratch;
  const SaveTarget one = job(scratch.path(), 1), other = job(scratch.path(), 2);
  Piece piece = filled("w1", 1);
  bool is_taken = false;
  piece.data = PieceData(at::kFloat, [&](int64_t, const Tensor& block) {
    block.fill_(1);
    if (std::exchange(is_taken, true)) return;
    remove_other_saves(other);
    write_half(one, 0, 1);
  });
  const std::string text = error_of([&] { write_rank(one, {1, {on_data_axis(1), "{}"}, {piece}}); });
  EXPECT_TRUE(contains(text, "rank 1 has no " + growing_path(one) + "/rank_00001.safetensors")) << text;
  EXPECT_TRUE(is_taken);
  abandon(one);
  EXPECT_TRUE(list_folder(scratch.path()).empty());
}

TEST(TwoJobs, DrawNoncesOfTheirOwn) {
  EXPECT_NE(draw_nonce(), draw_nonce());
  EXPECT_EQ(nonce_text(0xab), "00000000000000ab");
}

}  // namespace
}  // namespace deeptide::checkpoint
