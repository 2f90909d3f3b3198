// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A save reads the state of its beginning, however much of it has changed before the writer comes to it.
#include "checkpoint/save/live_state.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <thread>

#include "checkpoint/save/background_save.h"
#include "checkpoint/scratch.h"

namespace deeptide::checkpoint {
namespace {

using at::Tensor;

constexpr int64_t kMany = 3 * kBlockBytes / 4 + 1001;  // of fp32: blocks, and a part of one

Tensor numbers(int64_t numel, int64_t first) {
  return at::arange(first, first + numel, at::TensorOptions().dtype(at::kFloat));
}

Piece piece_of(const std::string& name, const Tensor& values, int group) {
  Piece piece = whole(name, "param", values);
  piece.changes_with = group;
  return piece;
}

/// Reads all of a protected piece as the writer does, block by block.
Tensor read_all(const Piece& piece, int64_t block, const std::function<void(int64_t)>& between = {}) {
  const int64_t numel = piece.region.numel();
  const Tensor all = at::zeros({numel}, piece.data.dtype());
  for (int64_t begin = 0; begin < numel; begin += block) {
    piece.data.transfer()(begin, all.narrow(0, begin, std::min(block, numel - begin)));
    if (between) between(begin);
  }
  return all;
}

TEST(LiveState, HandsOutWhatWasThereBeforeAChange) {
  for (const int64_t block : {int64_t{1000}, kBlockBytes / 4, kMany}) {
    const Tensor live = numbers(kMany, 0), before = live.clone();
    std::vector<Piece> pieces{piece_of("w", live, 0)};
    LiveState state(int64_t{1} << 30);
    state.protect(pieces);
    int64_t blocks = 0;
    const Tensor read = read_all(pieces[0], block, [&](int64_t) {
      if (blocks++ != 0) return;
      state.changing(0);
      live.fill_(-1);
      state.changing(0);  // again, as each step does: nothing is left to keep
    });
    EXPECT_TRUE(same_bits(read, before)) << block;
    EXPECT_EQ(state.peak_bytes(), std::max<int64_t>(kMany - block, 0) * 4) << block;
  }
}

TEST(LiveState, CopiesNothingThatDoesNotChange) {
  const Tensor a = numbers(100, 0), b = numbers(100, 100);
  std::vector<Piece> pieces{piece_of("a", a, 0), piece_of("b", b, 1)};
  LiveState state(int64_t{1} << 30);
  state.protect(pieces);
  state.changing(1);
  b.zero_();
  EXPECT_TRUE(same_bits(read_all(pieces[0], 64), a));
  EXPECT_TRUE(same_bits(read_all(pieces[1], 64), numbers(100, 100)));
  EXPECT_EQ(state.peak_bytes(), 400);
}

TEST(LiveState, HoldsAChangeUntilTheWriterHasMadeRoom) {
  const Tensor live = numbers(kMany, 0), before = live.clone();
  std::vector<Piece> pieces{piece_of("w", live, 0)};
  LiveState state(kBlockBytes);  // one block of the three and a bit
  state.protect(pieces);
  std::atomic<bool> changed = false;
  std::thread trainer([&] {
    state.changing(0);
    live.fill_(-1);
    changed = true;
  });
  while (state.peak_bytes() == 0) std::this_thread::yield();
  EXPECT_FALSE(changed);
  EXPECT_TRUE(same_bits(read_all(pieces[0], 100'000), before));
  trainer.join();
  EXPECT_TRUE(changed);
  EXPECT_LE(state.peak_bytes(), kBlockBytes);
}

TEST(LiveState, KeepsReadersAndWritersApartUnderLoad) {
  for (int round = 0; round < 20; ++round) {
    std::vector<Tensor> live;
    std::vector<Piece> pieces;
    for (int group = 0; group < 8; ++group) {
      live.push_back(at::full({40'000 + group}, static_cast<float>(group)));
      pieces.push_back(piece_of(std::to_string(group), live.back(), group));
    }
    LiveState state(100'000);
    state.protect(pieces);
    std::thread trainer([&] {
      for (int step = 1; step < 4; ++step) {
        for (int group = 7; group >= 0; --group) {
          state.changing(group);
          live[group].add_(100);
        }
      }
    });
    for (int group = 0; group < 8; ++group) {
      EXPECT_TRUE(same_bits(read_all(pieces[group], 999), at::full({40'000 + group}, static_cast<float>(group))));
    }
    state.release();
    trainer.join();
  }
}

TEST(LiveState, FailsTheWriterWhereACopyCannotBeTaken) {
  std::vector<Piece> pieces{whole("w", "param", numbers(10, 0))};
  pieces[0].data = {at::kFloat, [](int64_t, const Tensor&) { throw std::runtime_error("the disk is gone"); }};
  pieces[0].changes_with = 0;
  LiveState state(1 << 20);
  state.protect(pieces);
  state.changing(0);  // training goes on
  const std::string text = error_of([&] { read_all(pieces[0], 10); });
  EXPECT_TRUE(contains(text, "could not be copied for the save: the disk is gone")) << text;
}

SavePlan plan_of(const std::string& directory, const std::string& tag, const std::vector<Piece>& pieces) {
  return {{directory, tag, kNonce}, {0, {on_data_axis(0), "{}"}, pieces}};
}

TEST(BackgroundSave, WritesTheStateOfItsBeginning) {
  Scratch scratch;
  const Tensor live = numbers(kMany, 0), before = live.clone();
  BackgroundSave save(plan_of(scratch.path(), "t", {piece_of("w", live, 0)}), int64_t{1} << 30);
  save.live().changing(0);
  live.zero_();
  save.wait_idle([] {});
  ASSERT_EQ(save.phase(), SavePhase::written) << save.failure();
  EXPECT_FALSE(exists(scratch / "t"));
  save.commit();
  save.wait_idle([] {});
  ASSERT_EQ(save.phase(), SavePhase::committed) << save.failure();
  const Tensor back = at::zeros({kMany}, at::kFloat);
  Reader(scratch.path(), "t").read({whole("w", "param", back)});
  EXPECT_TRUE(same_bits(back, before));
  EXPECT_GE(save.written_bytes(), kMany * 4);
}

TEST(BackgroundSave, NamesTheFileThatItCouldNotWrite) {
  Scratch scratch;
  write_text(scratch / "file", "x");
  BackgroundSave save(plan_of(scratch / "file", "t", {piece_of("w", numbers(10, 0), 0)}), 1 << 20);
  save.wait_idle([] {});
  EXPECT_EQ(save.phase(), SavePhase::failed);
  EXPECT_TRUE(contains(save.failure(), scratch / "file")) << save.failure();
  save.live().changing(0);  // waits for nobody
}

TEST(BackgroundSave, EndsAtOnceWhenItIsGivenUp) {
  Scratch scratch;
  std::vector<Piece> pieces;
  for (int i = 0; i < 50; ++i) pieces.push_back(piece_of(std::to_string(i), numbers(kBlockBytes / 4, i), 0));
  { BackgroundSave save(plan_of(scratch.path(), "t", pieces), 1 << 20); }
  EXPECT_FALSE(exists(growing(scratch.path(), "t") + "/" + rank_table_name(0)));
}

TEST(WaitForTables, ReturnsWhenAllRanksHaveWrittenOrNoneWill) {
  Scratch scratch;
  const SaveTarget target{scratch.path(), "t", kNonce};
  write_rank(scratch.path(), "t", 0, {}, "{}");
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    write_rank(scratch.path(), "t", 1, {}, "{}");
  });
  EXPECT_TRUE(wait_for_tables(target, 2, [] { return false; }));
  late.join();
  EXPECT_FALSE(wait_for_tables(target, 3, [] { return true; }));
}

}  // namespace
}  // namespace deeptide::checkpoint
