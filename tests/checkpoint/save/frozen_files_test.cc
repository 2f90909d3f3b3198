// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Stores what is not trained once per folder: later saves link to it, and each checkpoint is whole by itself.
#include "checkpoint/save/frozen_files.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <sys/stat.h>

#include <algorithm>

#include "checkpoint/format/retention.h"
#include "checkpoint/scratch.h"
#include "deeptide/checkpoint.h"

namespace deeptide::checkpoint {
namespace {

using at::Tensor;

constexpr int64_t kNumel = (3 << 20) + 5;  // two hashed blocks

Piece frozen(const std::string& name, const Tensor& data) {
  Piece piece = whole(name, "param", data);
  piece.apart = true;
  return piece;
}

// Saves like an engine: links first, then writes. Returns the bytes that the second part wrote.
int64_t save_linking(const Scratch& scratch, const std::string& tag, const std::vector<Piece>& pieces) {
  const SaveTarget target{scratch.path(), tag, draw_nonce()};
  Snapshot snapshot{0, {on_data_axis(0), "{}"}, pieces};
  link_stored(target, snapshot);
  const int64_t bytes = write_rank(target, snapshot);
  commit(target, {}, true);
  return bytes;
}

std::vector<std::string> frozen_in(const std::string& folder) {
  std::vector<std::string> names = list_folder(folder);
  std::erase_if(names, [](const std::string& name) { return !is_frozen_name(name); });
  std::sort(names.begin(), names.end());
  return names;
}

int64_t num_links(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
  return static_cast<int64_t>(status.st_nlink);
}

void expect_holds(const Scratch& scratch, const std::string& tag, const std::vector<Piece>& pieces) {
  const Reader reader(scratch.path(), tag);
  for (const Piece& piece : pieces) {
    const Tensor back = at::zeros({piece.region.numel()}, piece.data.dtype());
    Piece wanted = piece;
    wanted.data = back;
    reader.read({wanted});
    EXPECT_TRUE(same_bits(back, piece.data.tensor())) << tag << ": " << piece.name;
  }
  EXPECT_EQ(verify_checkpoint(scratch.path(), tag), std::vector<std::string>{}) << tag;
}

TEST(FrozenFiles, AreLinkedWhileTheyStayAsTheyAre) {
  Scratch scratch;
  const Tensor base = at::arange(kNumel, at::kFloat), other = at::zeros({kNumel}, at::kFloat);
  const std::vector<Piece> first = {frozen("a", base), frozen("b", other), whole("t", "master", at::zeros({7}))};
  EXPECT_GT(save_linking(scratch, "one", first), 2 * kNumel * 4);
  const std::vector<std::string> names = frozen_in(scratch / "one");
  ASSERT_EQ(names.size(), 2u);
  EXPECT_LT(save_linking(scratch, "two", first), 1000);
  EXPECT_EQ(frozen_in(scratch / "two"), names);
  for (const std::string& name : names) EXPECT_EQ(num_links(scratch / "two/" + name), 2);

  const Tensor changed = base.clone();
  changed.mutable_data_ptr<float>()[kNumel - 1] = -1;
  const std::vector<Piece> third = {frozen("a", changed), frozen("b", other), first[2]};
  const int64_t bytes = save_linking(scratch, "three", third);
  EXPECT_TRUE(bytes > kNumel * 4 && bytes < kNumel * 5) << bytes;
  expect_holds(scratch, "one", first);
  expect_holds(scratch, "two", first);
  expect_holds(scratch, "three", third);
}

TEST(FrozenFiles, OutliveTheCheckpointThatWroteThem) {
  Scratch scratch;
  const std::vector<Piece> pieces = {frozen("a", at::arange(kNumel, at::kFloat))};
  save_linking(scratch, "one", pieces);
  save_linking(scratch, "two", pieces);
  save_linking(scratch, "two", pieces);  // over itself
  remove_checkpoint(scratch.path(), "one");
  EXPECT_EQ(num_links(scratch / "two/" + frozen_in(scratch / "two").at(0)), 1);
  expect_holds(scratch, "two", pieces);
}

TEST(FrozenFiles, TellTensorsAndRegionsOfEqualBytesApart) {
  Scratch scratch;
  const Tensor half = at::zeros({kNumel}, at::kFloat);
  const auto part = [&](const std::string& name, int64_t begin) {
    Piece piece = range_piece(name, "param", {2 * kNumel}, begin, begin + kNumel, half);
    piece.apart = true;
    return piece;
  };
  const std::vector<Piece> pieces = {part("a", 0), part("a", kNumel), part("b", 0), part("b", kNumel)};
  save_linking(scratch, "one", pieces);
  save_linking(scratch, "two", pieces);
  EXPECT_EQ(frozen_in(scratch / "two").size(), 4u);
  expect_holds(scratch, "two", pieces);
}

TEST(FrozenFiles, AreWrittenAnewWhereTheOldOneLostItsEndOrItsHeader) {
  for (const bool cut : {true, false}) {
    Scratch scratch;
    const std::vector<Piece> pieces = {frozen("a", at::arange(kNumel, at::kFloat))};
    save_linking(scratch, "one", pieces);
    const std::string path = scratch / "one/" + frozen_in(scratch / "one").at(0);
    std::string bytes = read_text(path);
    cut ? bytes.pop_back() : static_cast<void>(bytes[20] ^= 1);
    overwrite(path, bytes);
    EXPECT_GT(save_linking(scratch, "two", pieces), kNumel * 4);
    expect_holds(scratch, "two", pieces);
    EXPECT_NE(verify_checkpoint(scratch.path(), "one"), std::vector<std::string>{});
  }
}

TEST(FrozenFiles, AreReadThroughAFunctionToo) {
  Scratch scratch;
  const Tensor base = at::arange(kNumel, at::kFloat);
  Piece piece = frozen("a", base);
  piece.data = {at::kFloat,
                [&](int64_t begin, const Tensor& block) { block.copy_(base.narrow(0, begin, block.numel())); }};
  save_linking(scratch, "one", {piece});
  EXPECT_LT(save_linking(scratch, "two", {piece}), 1000);
  expect_holds(scratch, "two", {frozen("a", base)});
}

TEST(Verification, ReadersThatShareTheWorkFindEveryChangedByte) {
  Scratch scratch;
  const Tensor base = at::arange(kNumel, at::kFloat);
  save_linking(scratch, "one", {frozen("a", base), whole("b", "master", base), whole("seen", "buffer", base)});
  const std::vector<Piece> wanted = {range_piece("a", "param", {kNumel}, 0, 0, at::zeros({0})),
                                     range_piece("b", "master", {kNumel}, 0, 9, at::zeros({9})),
                                     whole("seen", "buffer", at::zeros({kNumel}))};
  const std::string own = scratch / "one/rank_00000.safetensors";
  const std::string apart = scratch / "one/" + frozen_in(scratch / "one").at(0);
  for (const std::string& path : {own, apart}) {
    const std::string sound = read_text(path);
    for (size_t at = 2000; at < sound.size(); at += sound.size() / 5) {
      std::string changed = sound;
      changed[at] = static_cast<char>(changed[at] ^ 4);
      overwrite(path, changed);
      const Reader reader(scratch.path(), "one");
      int found = 0;
      for (int part = 0; part < 3; ++part) {
        try {
          reader.verify(wanted, part, 3);
        } catch (const CheckpointError& error) {
          EXPECT_TRUE(contains(error.what(), "is damaged") && contains(error.what(), path)) << error.what();
          ++found;
        }
      }
      const bool of_buffer = path == own && at > sound.size() / 2;
      EXPECT_EQ(found, of_buffer ? 3 : 1) << path << " at " << at;
    }
    overwrite(path, sound);
    for (int part = 0; part < 3; ++part) Reader(scratch.path(), "one").verify(wanted, part, 3);
  }
}

}  // namespace
}  // namespace deeptide::checkpoint
