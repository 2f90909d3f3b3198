// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Shards that are cut over several folders: equal parts, one checkpoint, and nothing left of those that are gone.
#include "checkpoint/format/part_folders.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <filesystem>

#include "checkpoint/format/retention.h"
#include "checkpoint/save/shard_file.h"
#include "checkpoint/scratch.h"

namespace deeptide::checkpoint {
namespace {

namespace fs = std::filesystem;
using at::Tensor;

constexpr int64_t kBlockFloats = kBlockBytes / 4;

/// A run's folder, and drives beside it.
struct Drives {
  explicit Drives(int count, const char* run = "run") : directory(scratch / run) {
    for (int i = 0; i < count; ++i) folders.push_back(scratch / ("drive" + std::to_string(i)));
  }
  SaveTarget target(const std::string& tag, uint64_t nonce = draw_nonce()) const {
    return {directory, tag, nonce, folders};
  }
  /// Relative paths of all files on the drives.
  std::vector<std::string> files() const {
    std::vector<std::string> found;
    for (const std::string& folder : folders) {
      if (!exists(folder)) continue;
      for (const auto& item : fs::recursive_directory_iterator(folder)) {
        found.push_back(fs::relative(item.path(), scratch.path()));
      }
    }
    return found;
  }
  Scratch scratch;
  std::string directory;
  std::vector<std::string> folders;
};

struct Values {
  explicit Values(float first)
      : large(at::arange(5 * kBlockFloats, at::kFloat) + first),
        small(at::arange(100, at::kFloat) + first),
        half(at::arange(77, at::kFloat).to(at::kHalf) + first) {}
  Tensor large, small, half;
};

void write_parts(const SaveTarget& target, int rank, const Values& values) {
  const std::string suffix = std::to_string(rank);
  std::vector<Piece> pieces = {whole("half" + suffix, "param", values.half),
                               whole("large" + suffix, "master", values.large),
                               whole("small" + suffix, "exp_avg", values.small)};
  deal_out(pieces, static_cast<int>(target.folders.size()));
  write_rank(target, {rank, {on_data_axis(rank), "{}"}, std::move(pieces)});
}

void save_parts(const SaveTarget& target, const Values& values) {
  write_parts(target, 0, values);
  checkpoint::commit(target, {}, true);
}

void expect_values(const std::string& directory, const std::string& tag, int rank, const Values& values) {
  const std::string suffix = std::to_string(rank);
  const Tensor large = at::zeros_like(values.large), small = at::zeros_like(values.small),
               half = at::zeros_like(values.half);
  const Reader reader(directory, tag);
  const std::vector<Piece> wanted = {whole("large" + suffix, "master", large),
                                     whole("small" + suffix, "exp_avg", small), whole("half" + suffix, "param", half)};
  reader.verify(wanted, 0, 1);
  reader.read(wanted);
  EXPECT_TRUE(same_bits(large, values.large) && same_bits(small, values.small) && same_bits(half, values.half));
}

TEST(PartFolders, HaveEqualPartsOfEachRank) {
  const Drives drives(3);
  const SaveTarget target = drives.target("t");
  const Values values[] = {Values(1), Values(2)};
  write_parts(target, 1, values[1]);
  write_parts(target, 0, values[0]);
  checkpoint::commit(target, {.world_size = 2}, true);
  for (int rank : {0, 1}) {
    expect_values(drives.directory, "t", rank, values[rank]);
    for (int part = 0; part < 3; ++part) {
      const fs::path link = fs::path(drives.directory) / "t" / shard_name(rank, part);
      EXPECT_TRUE(fs::is_symlink(link));
      EXPECT_TRUE(fs::read_symlink(link).string().starts_with(drives.folders[part] + "/run-")) << link;
      const auto bytes = static_cast<int64_t>(fs::file_size(link));
      EXPECT_GT(bytes, kBlockBytes / 2) << link;
      EXPECT_LT(bytes, 2 * kBlockBytes + 10'000) << link;
    }
  }
  EXPECT_EQ(list_folder(drives.directory).size(), 2u);
}

TEST(PartFolders, AreReadThroughFunctionsAsWell) {
  const Drives drives(2);
  const SaveTarget target = drives.target("t");
  const Values values(3);
  int64_t next[2] = {0, 0};
  const auto read = [&](int64_t begin, const Tensor& block) {
    int64_t& expected = next[begin < 3 * kBlockFloats ? 0 : 1];
    EXPECT_TRUE(expected == 0 || begin == expected) << "each part's blocks are consecutive";
    expected = begin + block.numel();
    block.copy_(values.large.narrow(0, begin, block.numel()));
  };
  std::vector<Piece> pieces = {
      range_piece("large0", "master", {values.large.numel()}, 0, values.large.numel(), PieceData(at::kFloat, read)),
      whole("small0", "exp_avg", values.small), whole("half0", "param", values.half)};
  deal_out(pieces, 2);
  EXPECT_EQ(pieces.size(), 4u);
  write_rank(target, {0, {on_data_axis(0), "{}"}, std::move(pieces)});
  checkpoint::commit(target, {}, true);
  expect_values(drives.directory, "t", 0, values);
}

TEST(PartFolders, LoseNothingWhateverIsSavedAgainOrRemoved) {
  const Drives drives(2);
  for (int step : {1, 2, 3})
    save_parts(drives.target("global_step" + std::to_string(step)), Values(static_cast<float>(step)));
  save_parts(drives.target("global_step2"), Values(20));
  expect_values(drives.directory, "global_step1", 0, Values(1));
  expect_values(drives.directory, "global_step2", 0, Values(20));
  EXPECT_EQ(drives.files().size(), 2 * (1 + 3 * 2u)) << "a folder per drive, and a folder and a file per save";
  retain(drives.target("global_step3"), {.keep_last = 1});
  expect_values(drives.directory, "global_step2", 0, Values(20));
  expect_values(drives.directory, "global_step3", 0, Values(3));
  EXPECT_EQ(drives.files().size(), 2 * (1 + 2 * 2u)) << "the one of the largest step, and the latest";
  remove_checkpoint(drives.directory, "global_step2");
  remove_checkpoint(drives.directory, "global_step3");
  EXPECT_TRUE(drives.files().empty());
}

TEST(PartFolders, OfTwoRunsAreApart) {
  Drives drives(2);
  save_parts(drives.target("t"), Values(1));
  const std::string first = drives.directory;
  drives.directory = drives.scratch / "other/run";
  write_parts(drives.target("t"), 0, Values(2));  // its job dies
  save_parts(drives.target("t"), Values(3));
  expect_values(first, "t", 0, Values(1));
  expect_values(drives.directory, "t", 0, Values(3));
  fs::rename(first, drives.scratch / "moved");  // as somebody archives it; a new run takes its name
  drives.directory = first;
  save_parts(drives.target("t"), Values(4));
  expect_values(drives.scratch / "moved", "t", 0, Values(1));
  expect_values(first, "t", 0, Values(4));
}

TEST(PartFolders, KeepNothingOfSavesThatFailedOrCrashed) {
  const Drives drives(2);
  save_parts(drives.target("t"), Values(1));
  const size_t sound = drives.files().size();
  const SaveTarget failed = drives.target("t");
  write_parts(failed, 0, Values(2));
  EXPECT_GT(drives.files().size(), sound);
  abandon(failed);
  EXPECT_EQ(drives.files().size(), sound);
  // Crashes before the parts move to their places, and between that and the checkpoint's own move.
  write_parts(drives.target("t"), 0, Values(3));
  const SaveTarget late = drives.target("t");
  write_parts(late, 0, Values(3));
  settle_parts(late);
  expect_values(drives.directory, "t", 0, Values(1));
  save_parts(drives.target("t"), Values(4));
  expect_values(drives.directory, "t", 0, Values(4));
  EXPECT_EQ(drives.files().size(), sound);
}

TEST(PartFolders, ThatNotEveryRankSeesAreNamed) {
  const Drives drives(2);
  SaveTarget target = drives.target("t");
  write_parts(target, 0, Values(1));
  // Rank 1 writes on a host whose drives have the same names.
  SaveTarget elsewhere = target;
  for (std::string& folder : elsewhere.folders) folder += "-of-another-host";
  write_parts(elsewhere, 1, Values(1));
  for (int part : {0, 1}) {
    const std::string name = shard_name(1, part);
    remove_quietly(growing_path(target) + "/" + name);
    link_part(target, target.folders[part], name);
  }
  const std::string text = error_of([&] { checkpoint::commit(target, {.world_size = 2}, true); });
  EXPECT_TRUE(contains(text, "rank_00001") && contains(text, "leads to no file here; give checkpoint.folders")) << text;
  EXPECT_FALSE(exists(drives.directory + "/t"));
  const std::string nameless = error_of([&] { write_parts({drives.directory, "t", 1, {""}}, 0, Values(1)); });
  EXPECT_TRUE(contains(nameless, "has an empty name")) << nameless;
}

int g_asked = 0, g_denied = -1;
int deny_one(const char*, const std::string&) { return g_asked++ == g_denied ? ENOSPC : 0; }

TEST(PartFolders, LoseNothingWhateverRequestFails) {
  const Drives drives(2);
  const Values first(1), second(2);
  save_parts(drives.target("t"), first);
  const size_t sound = drives.files().size();
  int requests = 1;
  for (int refused = 0; refused < requests; ++refused) {
    g_asked = 0;
    g_denied = refused;
    refuse_with(deny_one);
    const SaveTarget target = drives.target("t");
    std::string text;
    try {
      save_parts(target, second);
    } catch (const CheckpointError& error) {
      text = error.what();
    }
    refuse_with(nullptr);
    requests = std::max(requests, g_asked + 1);
    if (refused >= g_asked) break;  // none was refused
    EXPECT_TRUE(contains(text, "No space left on device")) << refused << ": " << text;
    abandon(target);
    const bool replaced = drives.files().size() == sound && [&] {
      const Tensor half = at::zeros_like(first.half);
      Reader(drives.directory, "t").read({whole("half0", "param", half)});
      return same_bits(half, second.half);
    }();
    expect_values(drives.directory, "t", 0, replaced ? second : first);
    EXPECT_EQ(drives.files().size(), sound) << refused;
  }
  EXPECT_GT(requests, 12);
}

}  // namespace
}  // namespace deeptide::checkpoint
