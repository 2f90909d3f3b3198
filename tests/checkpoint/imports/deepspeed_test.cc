// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// DeepSpeed's folders that cannot be read say why. Those that can are read in
// tests/python/checkpoint/imports/test_moved_runs.py.
#include <gtest/gtest.h>

#include "checkpoint/imports/deepspeed_folder.h"
#include "checkpoint/imports/open_checkpoint.h"
#include "checkpoint/imports/torch_zip.h"
#include "checkpoint/load/other_folders.h"
#include "checkpoint/scratch.h"
#include "errors.h"

namespace deeptide::checkpoint {
namespace {

class DeepspeedFolderTest : public testing::Test {
 protected:
  DeepspeedFolderTest() { std::filesystem::create_directory(folder_); }
  void touch(const std::string& name) { write_bytes(folder_ + "/" + name, ""); }
  std::string refused() {
    return error_of([&] { open_checkpoint(scratch_.path(), "tag"); });
  }

  Scratch scratch_;
  std::string folder_ = scratch_ / "tag";
};

TEST_F(DeepspeedFolderTest, IsKnownByItsNames) {
  EXPECT_FALSE(is_deepspeed_folder(folder_));
  touch("notes.pt");
  EXPECT_FALSE(is_deepspeed_folder(folder_));
  EXPECT_NE(refused().find("manifest.json"), std::string::npos);
  touch("mp_rank_00_model_states.pt");
  EXPECT_TRUE(is_deepspeed_folder(folder_));
}

TEST_F(DeepspeedFolderTest, ListsRanksInTheirOrder) {
  touch("mp_rank_00_model_states.pt");
  for (int rank = 0; rank < 12; ++rank) {
    touch("bf16_zero_pp_rank_" + std::to_string(rank) + "_mp_rank_00_optim_states.pt");
  }
  const DeepspeedFolder folder = list_deepspeed_folder(folder_);
  ASSERT_EQ(folder.parts.size(), 1u);
  ASSERT_EQ(folder.parts[0].optimizers.size(), 12u);
  EXPECT_EQ(folder.parts[0].optimizers[10], "bf16_zero_pp_rank_10_mp_rank_00_optim_states.pt");
  EXPECT_FALSE(folder.universal);
}

TEST_F(DeepspeedFolderTest, LacksNoRank) {
  touch("mp_rank_00_model_states.pt");
  touch("zero_pp_rank_1_mp_rank_00_optim_states.pt");
  EXPECT_NE(refused().find("lacks the file of data-parallel rank 0"), std::string::npos) << refused();
  touch("zero_pp_rank_0_mp_rank_00_optim_states.pt");
  touch("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt");
  EXPECT_NE(refused().find("two files of data-parallel rank 1"), std::string::npos) << refused();
  std::filesystem::remove(folder_ + "/mp_rank_00_model_states.pt");
  std::filesystem::remove(folder_ + "/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt");
  EXPECT_NE(refused().find("has no *mp_rank_00_model_states.pt"), std::string::npos) << refused();
}

TEST_F(DeepspeedFolderTest, ListsStagesAndSlices) {
  for (const char* name : {"mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt", "layer_10-model_states.pt",
                           "layer_02-model_01-model_states.pt", "layer_02-model_00-model_states.pt",
                           "zero_pp_rank_0_mp_rank_01_optim_states.pt"}) {
    touch(name);
  }
  const DeepspeedFolder folder = list_deepspeed_folder(folder_);
  ASSERT_EQ(folder.parts.size(), 2u);
  EXPECT_EQ(folder.parts[1].optimizers.at(0), "zero_pp_rank_0_mp_rank_01_optim_states.pt");
  EXPECT_EQ(folder.layers.at(2).at(1), "layer_02-model_01-model_states.pt");
  EXPECT_EQ(folder.layers.at(10).size(), 1u);
  touch("mp_rank_03_model_states.pt");
  EXPECT_NE(refused().find("lacks the file of model-parallel rank 2"), std::string::npos) << refused();
  std::filesystem::remove(folder_ + "/mp_rank_01_model_states.pt");
  EXPECT_NE(refused().find("has no *mp_rank_01_model_states.pt"), std::string::npos) << refused();
}

TEST_F(DeepspeedFolderTest, OfOtherAxesIsRefusedByName) {
  const std::pair<const char*, const char*> cases[] = {
      {"layer_0_expert_2_mp_rank_00_model_states.pt", "experts"},
      {"expp_rank_0_mp_rank_00_optim_states.pt", "experts"},
  };
  for (const auto& [name, what] : cases) {
    touch(name);
    EXPECT_NE(refused().find(what), std::string::npos) << refused();
    EXPECT_NE(refused().find(name), std::string::npos) << refused();
    std::filesystem::remove(folder_ + "/" + name);
  }
}

TEST_F(DeepspeedFolderTest, IsFoundByItsOwnLatest) {
  write_bytes(scratch_ / "latest", "one\n");
  EXPECT_EQ(tag_to_load(scratch_.path(), true), "one");
  write_bytes(scratch_ / "latest_universal", "two\n");
  EXPECT_EQ(tag_to_load(scratch_.path(), true), "two");
  EXPECT_EQ(tag_to_load(scratch_.path(), false), "one");
  write_bytes(scratch_ / "latest_universal", "../two");
  EXPECT_NE(error_of([&] { tag_to_load(scratch_.path(), true); }).find("cannot name a folder"), std::string::npos);
}

}  // namespace
}  // namespace deeptide::checkpoint
