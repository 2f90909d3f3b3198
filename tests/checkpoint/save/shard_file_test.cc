// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checkpoints of random worlds: read back bit for bit by any other world.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "checkpoint/format/file_io.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/load/reader.h"
#include "checkpoint/random_regions.h"
#include "checkpoint/save/block_writer.h"
#include "checkpoint/scratch.h"

namespace deeptide::checkpoint {
namespace {

using at::Tensor;

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble,
                                      at::kLong,  at::kByte,     at::kBool};

struct Truth {
  std::string name;
  std::string role;
  std::vector<int64_t> shape;
  Tensor flat;
};

// Any bit pattern, NaNs with payloads included; a bool holds only 0 and 1.
Tensor random_bits(std::mt19937& random, int64_t numel, at::ScalarType dtype) {
  const Tensor data = at::empty({numel}, dtype);
  auto* bytes = static_cast<unsigned char*>(data.mutable_data_ptr());
  for (size_t i = 0; i < data.nbytes(); ++i)
    bytes[i] = static_cast<unsigned char>(draw(random, dtype == at::kBool ? 2 : 256));
  return data;
}

std::vector<Truth> random_tensors(std::mt19937& random) {
  const std::vector<std::vector<int64_t>> shapes = {{}, {0}, {1}, {3, 0, 2}, {7}, {4, 5}, {2, 3, 11}, {301}};
  const char* names[] = {"weight", "h.0/odd@3", "größe 重み \"quoted\" \\ \n", "", "__metadata__"};
  std::vector<Truth> tensors;
  for (const char* name : names) {
    for (const char* role : {"master", "exp_avg"}) {
      const auto& shape = shapes[draw(random, static_cast<int64_t>(shapes.size()))];
      const at::ScalarType dtype = kDtypes[draw(random, static_cast<int64_t>(std::size(kDtypes)))];
      tensors.push_back({name, role, shape, random_bits(random, numel_of(shape, "test"), dtype)});
    }
  }
  return tensors;
}

// Cuts each tensor at random points, some of them equal, and deals the parts to the ranks.
std::vector<std::vector<Piece>> deal(std::mt19937& random, const std::vector<Truth>& tensors, int world, bool blank) {
  std::vector<std::vector<Piece>> ranks(world);
  for (const Truth& truth : tensors) {
    std::vector<int64_t> cuts = {0, truth.flat.numel()};
    for (int64_t i = draw(random, 2 * world); i > 0; --i) cuts.push_back(draw(random, truth.flat.numel() + 1));
    std::sort(cuts.begin(), cuts.end());
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const Tensor part = truth.flat.narrow(0, cuts[i], cuts[i + 1] - cuts[i]);
      ranks[draw(random, world)].push_back(
          range_piece(truth.name, truth.role, truth.shape, cuts[i], cuts[i + 1], blank ? at::zeros_like(part) : part));
    }
  }
  return ranks;
}

TEST(ShardFile, ReadsBackBitForBitWhateverTheWorldsAndTheCuts) {
  Scratch scratch;
  for (int round = 0; round < 25; ++round) {
    std::mt19937 random(round);
    const std::vector<Truth> tensors = random_tensors(random);
    const int world = 1 + static_cast<int>(draw(random, 5));
    const auto saved = deal(random, tensors, world, false);
    for (int rank = 0; rank < world; ++rank) write_rank(scratch.path(), "t", rank, saved[rank], std::to_string(rank));
    commit(scratch.path(), "t", {.world_size = world}, true);

    const Reader reader(scratch.path(), "t");
    EXPECT_EQ(reader.table().size(), tensors.size());
    for (const auto& wanted : deal(random, tensors, 1 + static_cast<int>(draw(random, 5)), true)) {
      EXPECT_EQ(reader.check(wanted, false), std::vector<std::string>{});
      reader.read(wanted);
      for (const Piece& piece : wanted) {
        const auto truth = std::find_if(tensors.begin(), tensors.end(), [&](const Truth& candidate) {
          return candidate.name == piece.name && candidate.role == piece.role.text();
        });
        ASSERT_TRUE(
            same_bits(piece.data.tensor(), truth->flat.narrow(0, piece.region.offsets[0], piece.region.sizes[0])))
            << "round " << round << " " << piece.name << "/" << piece.role.text() << " " << piece.region.text();
      }
    }
  }
}

TEST(ShardFile, KeepsStatesCharacterForCharacter) {
  Scratch scratch;
  const std::string odd = "{\"rng\": 340282366920938463463374607431768211455,  \"loss\": NaN, \"ö\": 1e-3}";
  write_rank(scratch.path(), "t", 0, {}, "zero");
  write_rank(scratch.path(), "t", 1, {}, odd);
  const std::string folder =
      commit(scratch.path(), "t", {.world_size = 2, .state_json = odd, .client_state_json = "{\"epoch\":3}"}, true);
  EXPECT_EQ(folder, scratch / "t");
  const Reader reader(scratch.path(), "t");
  EXPECT_EQ(reader.manifest().version, 3);
  EXPECT_EQ(reader.manifest().world_size, 2);
  EXPECT_EQ(reader.manifest().state_json, odd);
  EXPECT_EQ(reader.manifest().client_state_json, "{\"epoch\":3}");
  EXPECT_EQ(reader.rank_state_json(on_data_axis(0)), "zero");
  EXPECT_EQ(reader.rank_state_json(on_data_axis(1)), odd);
  EXPECT_EQ(reader.rank_state_json(on_data_axis(2)), "");
  EXPECT_EQ(reader.rank_state_json(Coordinates({{"tensor", 1}})), "");
  EXPECT_TRUE(reader.table().empty());
}

TEST(ShardFile, WritesTheFilesThatTheLayoutPromises) {
  Scratch scratch;
  const Tensor data = at::arange(10, at::kFloat);
  write_rank(scratch.path(), "t", 0,
             {range_piece("w", "param", {10}, 0, 4, data.narrow(0, 0, 4)),
              range_piece("b", "buffer", {}, 0, 1, at::zeros({1}, at::kByte))},
             "{}");
  write_rank(scratch.path(), "t", 1,
             {range_piece("w", "param", {10}, 8, 10, data.narrow(0, 8, 2)),
              range_piece("w", "param", {10}, 4, 8, data.narrow(0, 4, 4))},
             "{}");
  commit(scratch.path(), "t", {.world_size = 2}, true);

  std::vector<std::string> files = list_folder(scratch / "t");
  std::sort(files.begin(), files.end());
  EXPECT_EQ(files, (std::vector<std::string>{"manifest.json", "rank_00000.safetensors", "rank_00001.safetensors"}));
  EXPECT_EQ(read_text(scratch / "latest"), "t");
  const Header first = read_header(File::open(scratch / "t/rank_00000.safetensors"));
  const Header second = read_header(File::open(scratch / "t/rank_00001.safetensors"));
  EXPECT_EQ(first.data_offset % 64, 0);
  EXPECT_EQ(first.entries.at("w/param").begin, 0);  // the wider dtype comes first
  EXPECT_EQ(first.entries.at("b/buffer").begin, 16);
  EXPECT_EQ(second.entries.count("w/param@4"), 1u);
  EXPECT_EQ(second.entries.at("w/param@8").shape, std::vector<int64_t>{2});
  const auto manifest = nlohmann::json::parse(read_text(scratch / "t/manifest.json"));
  const auto& pieces = manifest.at("tensors").at(1).at("pieces");
  ASSERT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[1].at("offsets").dump(), "[4]");
  EXPECT_EQ(pieces[1].at("sizes").dump(), "[4]");
  EXPECT_EQ(pieces[1].at("file"), "rank_00001.safetensors");
  float value;
  File::open(scratch / "t/rank_00001.safetensors").read_at(&value, sizeof(value), pieces[1].at("offset"));
  EXPECT_EQ(value, 4.0f);
}

TEST(ShardFile, CastsBetweenFloatingTypesOnRead) {
  Scratch scratch;
  const Tensor values = at::arange(1000, at::kFloat).div_(7);
  for (at::ScalarType from : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    save(scratch.path(), "t", {whole("w", "param", values.to(from))});
    for (at::ScalarType to : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      const Tensor back = at::zeros({1000}, to);
      Reader(scratch.path(), "t").read({whole("w", "param", back)});
      EXPECT_TRUE(same_bits(back, values.to(from).to(to))) << from << " to " << to;
    }
  }
}

TEST(ShardFile, WritesAndFillsStridedTensorsInBlocks) {
  Scratch scratch;
  // More than two blocks, and not a multiple of one.
  const int64_t numel = 2 * kBlockBytes / 4 + 12345;
  const Tensor base = at::arange(2 * numel, at::kFloat).view({numel, 2});
  save(scratch.path(), "t", {whole("strided", "param", base.select(1, 0)), whole("dense", "param", base.view({-1}))});
  const Tensor back = at::zeros({numel, 2}, at::kDouble);
  const Tensor dense = at::zeros({2 * numel}, at::kFloat);
  const Reader reader(scratch.path(), "t");
  reader.read({whole("strided", "param", back.select(1, 1)), whole("dense", "param", dense)});
  EXPECT_TRUE(at::equal(back.select(1, 1), base.select(1, 0).to(at::kDouble)));
  EXPECT_TRUE(at::equal(back.select(1, 0), at::zeros({numel}, at::kDouble)));
  EXPECT_TRUE(same_bits(dense, base.view({-1})));
}

TEST(ShardFile, FillsLeavesThatRequireGradients) {
  Scratch scratch;
  const Tensor data = at::arange(6, at::kFloat);
  save(scratch.path(), "t", {whole("w", "param", data.clone().requires_grad_())});
  for (at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Tensor leaf = at::zeros({6}, dtype).requires_grad_();
    Reader(scratch.path(), "t").read({whole("w", "param", leaf)});
    EXPECT_TRUE(at::equal(leaf.detach(), data.to(dtype)));
  }
}

TEST(ShardFile, ListsEveryMismatchAndReadsNothingThen) {
  Scratch scratch;
  const Tensor data = at::arange(6, at::kFloat);
  save(scratch.path(), "t",
       {range_piece("fits", "param", {6}, 0, 6, data), range_piece("shape", "param", {2, 3}, 0, 6, data),
        range_piece("extra", "param", {6}, 0, 6, data), range_piece("hole", "param", {9}, 0, 2, data.narrow(0, 0, 2)),
        range_piece("hole", "param", {9}, 4, 6, data.narrow(0, 4, 2)), range_piece("kind", "buffer", {6}, 0, 6, data)});
  const Reader reader(scratch.path(), "t");
  const Tensor back = at::zeros({6}, at::kFloat);
  const std::vector<Piece> wanted = {range_piece("fits", "param", {6}, 0, 6, back),
                                     range_piece("shape", "param", {3, 2}, 0, 6, at::zeros({6}, at::kFloat)),
                                     range_piece("absent", "param", {6}, 0, 6, at::zeros({6}, at::kFloat)),
                                     range_piece("hole", "param", {9}, 0, 3, at::zeros({3}, at::kFloat)),
                                     range_piece("hole", "param", {9}, 4, 9, at::zeros({5}, at::kFloat)),
                                     range_piece("kind", "buffer", {6}, 0, 6, at::zeros({6}, at::kLong))};
  const std::vector<std::string> expected = {
      "shape of 'shape/param': the checkpoint has (2, 3), expected (3, 2)",
      "missing in the checkpoint: 'absent/param' of shape (6)",
      "range of 'hole/param': elements [2, 3) are in no shard",
      "range of 'hole/param': elements [6, 9) are in no shard",
      "dtype of 'kind/buffer': the checkpoint has F32, which is not cast to Long",
  };
  EXPECT_EQ(reader.check(wanted, false), expected);
  std::vector<std::string> strict = expected;
  strict.push_back("unexpected in the checkpoint: 'extra/param' of shape (6)");
  EXPECT_EQ(reader.check(wanted, true), strict);
  const std::string text = error_of([&] { reader.read(wanted); });
  for (const std::string& line : expected) EXPECT_TRUE(contains(text, line)) << text;
  EXPECT_TRUE(at::equal(back, at::zeros({6}, at::kFloat)));
  // Pieces that fit are readable on their own, around the holes too.
  reader.read({wanted[0], range_piece("hole", "param", {9}, 4, 6, at::zeros({2}, at::kFloat))});
  EXPECT_TRUE(at::equal(back, data));
  EXPECT_EQ(reader.check({range_piece("fits", "param", {6}, 2, 7, Tensor())}, false),
            std::vector<std::string>{"range of 'fits/param': [2, 7) is not within its 6 elements"});
}

TEST(ShardFile, RefusesDataThatIsNotItsRange) {
  Scratch scratch;
  const Tensor data = at::arange(6, at::kFloat);
  const Piece bad[] = {range_piece("w", "param", {6}, 0, 5, data),
                       range_piece("w", "param", {6}, -1, 5, data),
                       range_piece("w", "param", {5}, 0, 6, data),
                       range_piece("w", "param", {6}, 4, 3, data),
                       range_piece("w", "param", {6}, 0, 6, Tensor()),
                       {"w", Role::param(), {2, 3}, {{0, 0}, {2, 4}}, data},
                       {"w", Role::param(), {2, 3}, {{0, 0, 0}, {2, 3, 1}}, data},
                       {"w", Role::param(), {2, 3}, {{0, 1}, {2, 2}}, data},
                       range_piece("w", "param", {6}, 0, 6, at::zeros({3, 4}).t().slice(0, 0, 2))};
  for (const Piece& piece : bad) {
    EXPECT_TRUE(contains(error_of([&] { write_rank(scratch.path(), "t", 0, {piece}, "{}"); }), "cannot save 'w/"));
  }
  EXPECT_FALSE(exists(growing(scratch.path(), "t")));
  save(scratch.path(), "t", {whole("w", "param", data)});
  for (const Tensor& into : {Tensor(), at::zeros({5}), at::zeros({7})}) {
    EXPECT_TRUE(
        contains(error_of([&] { Reader(scratch.path(), "t").read({range_piece("w", "param", {6}, 0, 6, into)}); }),
                 "cannot load 'w/param'"));
  }
}

TEST(ShardFile, RefusesRanksThatContradictEachOther) {
  Scratch scratch;
  const Tensor data = at::arange(6, at::kFloat);
  const Piece first = range_piece("w", "param", {6}, 0, 4, data.narrow(0, 0, 4));
  const struct {
    Piece second;
    const char* why;
  } cases[] = {
      {range_piece("w", "param", {6}, 3, 6, data.narrow(0, 3, 3)),
       "element 3 of 'w/param' is in two pieces, [0, 4) and [3, 6)"},
      {range_piece("w", "param", {2, 3}, 4, 6, data.narrow(0, 4, 2)), "got shape (2, 3) F32 after (6) F32"},
      {range_piece("w", "param", {6}, 4, 6, data.narrow(0, 4, 2).to(at::kHalf)), "got shape (6) F16 after (6) F32"},
  };
  for (const auto& [second, why] : cases) {
    write_rank(scratch.path(), "t", 0, {first}, "{}");
    write_rank(scratch.path(), "t", 1, {second}, "{}");
    const std::string merged = error_of([&] { commit(scratch.path(), "t", {.world_size = 2}, true); });
    EXPECT_TRUE(contains(merged, why)) << merged;
    const std::string alone = error_of([&] { write_rank(scratch.path(), "t", 0, {first, second}, "{}"); });
    EXPECT_TRUE(contains(alone, why)) << alone;
    EXPECT_EQ(latest_tag(scratch.path()), "");
  }
}

}  // namespace
}  // namespace deeptide::checkpoint
