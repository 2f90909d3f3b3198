// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checkpoints cut into random ranges and boxes: read back bit for bit in any other cut, by any other world.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <random>

#include "checkpoint/random_regions.h"
#include "checkpoint/save/block_writer.h"
#include "checkpoint/scratch.h"

namespace deeptide::checkpoint {
namespace {

using at::Tensor;

struct Original {
  std::string name;
  Role role;
  Shape shape;
  Tensor flat;
};

Tensor random_elements(std::mt19937& random, int64_t numel, at::ScalarType dtype) {
  const Tensor data = at::empty({numel}, dtype);
  auto* bytes = static_cast<unsigned char*>(data.mutable_data_ptr());
  for (size_t i = 0; i < data.nbytes(); ++i) bytes[i] = static_cast<unsigned char>(draw(random, 256));
  return data;
}

std::vector<Original> random_originals(std::mt19937& random) {
  const at::ScalarType dtypes[] = {at::kFloat, at::kBFloat16, at::kLong, at::kByte};
  std::vector<Original> tensors;
  for (int i = 0; i < 4; ++i) {
    Shape shape(draw(random, 5));
    for (int64_t& size : shape) size = draw(random, 8) == 0 ? 0 : 1 + draw(random, 7);
    tensors.push_back({"t" + std::to_string(i), i % 2 ? Role::master() : Role::moment("exp_avg"), shape,
                       random_elements(random, product_of(shape), dtypes[draw(random, 4)])});
  }
  return tensors;
}

Tensor elements(const Original& original, const Region& region) {
  const std::vector<int64_t> indices = elements_of(original.shape, region);
  const Tensor data = at::empty({std::ssize(indices)}, original.flat.options());
  const size_t width = data.element_size();
  for (size_t i = 0; i < indices.size(); ++i) {
    std::memcpy(static_cast<char*>(data.mutable_data_ptr()) + i * width,
                static_cast<const char*>(original.flat.const_data_ptr()) + indices[i] * width, width);
  }
  return data;
}

// A tensor, or a function that copies from or to one: `stored` must live as long.
PieceData data_of(std::mt19937& random, const Tensor& stored, bool save) {
  if (draw(random, 2)) return stored;
  return {stored.scalar_type(), [stored, save](int64_t begin, const Tensor& block) {
            const Tensor part = stored.narrow(0, begin, block.numel());
            save ? block.copy_(part) : part.copy_(block);
          }};
}

std::vector<std::vector<Piece>> deal_regions(std::mt19937& random, const std::vector<Original>& tensors, int world) {
  std::vector<std::vector<Piece>> ranks(world);
  for (const Original& original : tensors) {
    for (const Region& region : random_partition(random, original.shape)) {
      ranks[draw(random, world)].push_back(
          {original.name, original.role, original.shape, region, data_of(random, elements(original, region), true)});
    }
  }
  return ranks;
}

void save_ranks(const std::string& directory, const std::vector<std::vector<Piece>>& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    write_rank(directory, "t", static_cast<int>(rank), ranks[rank], "{}");
  }
  commit(directory, "t", {.world_size = static_cast<int>(ranks.size())}, true);
}

TEST(Resharding, ReadsBackBitForBitWhateverTheRegions) {
  Scratch scratch;
  for (int round = 0; round < 60; ++round) {
    std::mt19937 random(round);
    const std::vector<Original> tensors = random_originals(random);
    save_ranks(scratch.path(), deal_regions(random, tensors, 1 + static_cast<int>(draw(random, 5))));
    const Reader reader(scratch.path(), "t");
    std::vector<Piece> wanted;
    std::vector<Tensor> expected, filled;
    for (const Original& original : tensors) {
      std::vector<Region> regions = random_partition(random, original.shape);
      for (int i = 0; i < 3; ++i) regions.push_back(random_region(random, original.shape));  // these may overlap
      for (const Region& region : regions) {
        expected.push_back(elements(original, region));
        filled.push_back(at::zeros({region.numel()}, original.flat.options()));
        wanted.push_back({original.name, original.role, original.shape, region, data_of(random, filled.back(), false)});
      }
    }
    EXPECT_EQ(reader.check(wanted, true), std::vector<std::string>{});
    reader.read(wanted);
    for (size_t i = 0; i < wanted.size(); ++i) {
      ASSERT_TRUE(same_bits(filled[i], expected[i]))
          << "round " << round << " " << wanted[i].name << " " << wanted[i].region.text();
    }
  }
}

TEST(Resharding, NamesTensorAndRegionOfElementsThatNobodySaved) {
  Scratch scratch;
  int rounds = 0;
  for (int seed = 0; rounds < 40; ++seed) {
    std::mt19937 random(1000 + seed);
    const std::vector<Original> tensors = random_originals(random);
    auto ranks = deal_regions(random, tensors, 2);
    auto& pieces = ranks[draw(random, 2)];
    if (pieces.empty()) continue;
    const auto lost = pieces.begin() + draw(random, std::ssize(pieces));
    const Piece piece = *lost;
    if (piece.region.numel() == 0) continue;
    lost->region.sizes.assign(lost->region.sizes.size(), 0);
    lost->data = at::empty({0}, piece.data.dtype());
    if (lost->region.sizes.empty()) continue;  // a scalar's only box
    ++rounds;
    save_ranks(scratch.path(), ranks);
    const auto lines =
        Reader(scratch.path(), "t").check({{piece.name, piece.role, piece.shape, piece.region, {}}}, false);
    ASSERT_EQ(lines.size(), 1u) << piece.region.text();
    EXPECT_TRUE(contains(lines[0], "'" + piece.name + "/") && contains(lines[0], "are in no shard")) << lines[0];
    const bool range = piece.region.sizes.size() == 1;
    EXPECT_TRUE(contains(lines[0], range ? "elements [" + std::to_string(piece.region.offsets[0]) + ", "
                                         : "region " + piece.region.text()))
        << lines[0];
  }
}

TEST(Resharding, NamesTensorAndRegionsOfElementsThatAreSavedTwice) {
  Scratch scratch;
  int rounds = 0;
  for (int seed = 0; rounds < 40; ++seed) {
    std::mt19937 random(2000 + seed);
    const std::vector<Original> tensors = random_originals(random);
    const Original& original = tensors[draw(random, std::ssize(tensors))];
    const Region again = random_region(random, original.shape);
    if (again.numel() == 0) continue;
    ++rounds;
    auto ranks = deal_regions(random, tensors, 2);
    ranks[draw(random, 2)].push_back({original.name, original.role, original.shape, again, elements(original, again)});
    const std::string text = error_of([&] { save_ranks(scratch.path(), ranks); });
    EXPECT_TRUE(contains(text, " of '" + original.name + "/") && contains(text, "' is in two pieces, ") &&
                contains(text, again.text()))
        << text;
  }
}

// A column-parallel matrix: more than a block, with a cast, strided data and gaps that are read over or skipped.
TEST(Resharding, TurnsColumnsIntoRowsAndBack) {
  Scratch scratch;
  for (const int64_t columns : {int64_t{6}, kBlockBytes / 4 / 8, kBlockBytes / 4 + 30}) {
    const Shape shape = {4, columns};
    const Tensor matrix = at::arange(4 * columns, at::kFloat).view({4, columns});
    const auto slice = [&](int64_t begin, int64_t end) {
      return Piece{
          "w", Role::param(), shape, {{0, begin}, {4, end - begin}}, matrix.narrow(1, begin, end - begin).contiguous()};
    };
    save_ranks(scratch.path(), {{slice(0, 2)}, {slice(2, columns - 1), slice(columns - 1, columns)}});
    const Reader reader(scratch.path(), "t");
    const Tensor flat = at::zeros({4 * columns}, at::kFloat);
    const Tensor doubles = at::zeros({2 * columns, 2}, at::kDouble);
    const Tensor inner = at::zeros({3, columns - 3}, at::kFloat);
    const Tensor column = at::zeros({4, 1}, at::kDouble);
    reader.read({{"w", Role::param(), shape, Region::range(0, 4 * columns), flat},
                 {"w", Role::param(), shape, {{1, 0}, {2, columns}}, doubles.select(1, 1)},
                 {"w", Role::param(), shape, {{1, 1}, {3, columns - 3}}, inner},
                 {"w", Role::param(), shape, {{0, 3}, {4, 1}}, column}});
    EXPECT_TRUE(at::equal(flat, matrix.view({-1})));
    EXPECT_TRUE(at::equal(doubles.select(1, 1), matrix.narrow(0, 1, 2).reshape({-1}).to(at::kDouble)));
    EXPECT_TRUE(at::equal(doubles.select(1, 0), at::zeros({2 * columns}, at::kDouble)));
    EXPECT_TRUE(at::equal(inner, matrix.narrow(0, 1, 3).narrow(1, 1, columns - 3)));
    EXPECT_TRUE(at::equal(column, matrix.narrow(1, 3, 1).to(at::kDouble)));
  }
}

// State that is in no single tensor: written and read block by block, each element exactly once.
TEST(Resharding, MovesStateThroughFunctionsInBlocks) {
  Scratch scratch;
  const int64_t numel = 2 * kBlockBytes / 4 + 12345;
  const auto value = [](int64_t i) { return static_cast<float>(i % 100'003); };
  int64_t written = 0;
  const BlockTransfer fill = [&](int64_t begin, const Tensor& block) {
    EXPECT_EQ(begin, written) << "blocks are consecutive";
    EXPECT_LE(static_cast<int64_t>(block.nbytes()), kBlockBytes);
    EXPECT_TRUE(block.is_cpu() && block.is_contiguous() && block.dim() == 1);
    for (int64_t i = 0; i < block.numel(); ++i) block.mutable_data_ptr<float>()[i] = value(begin + i);
    written += block.numel();
  };
  save_ranks(scratch.path(), {{{"w", Role::master(), {numel}, Region::range(0, numel), {at::kFloat, fill}}}});
  EXPECT_EQ(written, numel);
  int64_t read = 0;
  const BlockTransfer take = [&](int64_t begin, const Tensor& block) {
    EXPECT_LE(static_cast<int64_t>(block.numel()), kBlockBytes / 4);
    ASSERT_EQ(block.scalar_type(), at::kDouble);  // cast from what the checkpoint has
    for (int64_t i = 0; i < block.numel(); ++i) {
      ASSERT_EQ(block.const_data_ptr<double>()[i], static_cast<double>(value(7 + begin + i)));
    }
    read += block.numel();
  };
  const Reader reader(scratch.path(), "t");
  reader.read({{"w", Role::master(), {numel}, Region::range(7, numel - 1), {at::kDouble, take}}});
  EXPECT_EQ(read, numel - 8);
  const auto text = error_of([&] {
    save_ranks(scratch.path(),
               {{{"w", Role::master(), {4}, Region::range(0, 4), {at::kFloat, [](int64_t, const Tensor&) {
                                                                    throw CheckpointError("the tier is gone");
                                                                  }}}}});
  });
  EXPECT_EQ(text, "the tier is gone");
  EXPECT_EQ(latest_tag(scratch.path()), "t");
}

}  // namespace
}  // namespace deeptide::checkpoint
