// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checkpoints read as folders: every tensor and range, of any world; every changed byte is found.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include <fstream>
#include <iterator>

#include "checkpoint/golden.h"
#include "checkpoint/scratch.h"
#include "deeptide/checkpoint.h"

namespace deeptide::checkpoint {
namespace {

using at::Tensor;

const std::string kGolden = DEEPTIDE_GOLDEN_FOLDER;

// Two ranks: a vector in ranges, a matrix in columns, moments, and a buffer of each rank's own.
std::string save_two_ranks(const Scratch& scratch, const Tensor& vector, const Tensor& matrix) {
  for (int rank = 0; rank < 2; ++rank) {
    const int64_t cut = 3, begin = rank == 0 ? 0 : cut, end = rank == 0 ? cut : vector.numel();
    const int64_t half = matrix.size(1) / 2;
    const Tensor columns = matrix.narrow(1, rank * half, half).contiguous();
    write_rank(
        scratch.path(), "two", rank,
        {range_piece("vector", "master", {vector.numel()}, begin, end, vector.narrow(0, begin, end - begin)),
         {"matrix", Role::master(), matrix.sizes().vec(), {{0, rank * half}, {matrix.size(0), half}}, columns},
         range_piece("vector", "exp_avg", {vector.numel()}, begin, end, vector.narrow(0, begin, end - begin).mul(2)),
         {"seen", Role::buffer(on_data_axis(rank)), {1}, Region::range(0, 1), at::zeros({1}, at::kLong)}},
        "{}");
  }
  return commit(scratch.path(), "two", Manifest{.world_size = 2, .state_json = R"({"global_steps": 7})"}, true);
}

std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(OfflineReader, ReadsTensorsAndRangesThatSeveralRanksSaved) {
  const Scratch scratch;
  const Tensor vector = at::arange(11, at::kFloat), matrix = at::arange(24, at::kFloat).view({4, 6});
  save_two_ranks(scratch, vector, matrix);
  const CheckpointReader reader(scratch.path());
  EXPECT_EQ(reader.world_size(), 2);
  EXPECT_EQ(reader.global_steps(), 7);
  std::vector<std::string> keys;
  for (const CheckpointTensor& tensor : reader.tensors()) keys.push_back(tensor.name + "/" + tensor.role);
  EXPECT_EQ(keys, (std::vector<std::string>{"matrix/master", "seen/buffer", "seen/buffer.data=1", "vector/exp_avg",
                                            "vector/master"}));
  EXPECT_TRUE(reader.read(reader.find("matrix")).equal(matrix));
  EXPECT_TRUE(reader.read(reader.find("vector", "exp_avg")).equal(vector.mul(2)));
  for (int64_t begin = 0; begin <= 24; ++begin) {
    for (int64_t end = begin; end <= 24; ++end) {
      EXPECT_TRUE(
          reader.read(reader.find("matrix"), begin, end).equal(matrix.view({-1}).narrow(0, begin, end - begin)));
    }
  }
  EXPECT_TRUE(CheckpointReader(scratch / "two").read(reader.find("vector")).equal(vector));  // the folder itself
}

TEST(OfflineReader, SaysWhatIsNotThere) {
  const Scratch scratch;
  save_two_ranks(scratch, at::arange(11, at::kFloat), at::arange(24, at::kFloat).view({4, 6}));
  const CheckpointReader reader(scratch.path());
  EXPECT_TRUE(contains(error_of([&] { reader.find("vect"); }), "has no 'vect'; it has 'vector' as exp_avg"));
  EXPECT_TRUE(contains(error_of([&] { reader.find("seen", "master"); }), "has no 'seen' as master"));
  EXPECT_TRUE(contains(error_of([&] { CheckpointReader(scratch.path(), "three"); }), "three/manifest.json"));
  EXPECT_TRUE(contains(error_of([&] { CheckpointReader(scratch / "no"); }), "neither a file 'latest' nor a manifest"));
  EXPECT_THROW(reader.read(reader.find("vector"), 3, 12), ConfigError);
  EXPECT_THROW(reader.read(reader.find("vector"), 4, 3), ConfigError);
}

TEST(OfflineReader, ReadsCheckpointsOfEarlierVersionsWhichHaveNoHashes) {
  for (const char* version : {"/golden_v1", "/golden_v2"}) {
    for (const auto& summary : list_checkpoints(kGolden + version)) EXPECT_FALSE(summary.has_hashes);
    const CheckpointReader reader(kGolden + version, "fp32");
    for (const GoldenTensor& t : golden_tensors(at::kFloat)) {
      const Tensor read = reader.read(reader.find(t.name, t.role)).contiguous().view({-1});
      EXPECT_TRUE(same_bits(read, golden_data(t))) << version << " " << t.name;
    }
    EXPECT_TRUE(verify_checkpoint(kGolden + version, "fp32").empty());
  }
}

// Blocks of a piece are hashed apart: a tensor of several blocks, and one whose piece ends within a block.
TEST(OfflineReader, ChecksLargeTensorsBlockByBlock) {
  const Scratch scratch;
  const int64_t numel = 2 * kHashedBlockBytes / 4 + 1000;
  const Tensor large = at::arange(numel, at::kInt);
  save(scratch.path(), "large", {whole("large", "param", large)});
  const CheckpointReader reader(scratch.path());
  EXPECT_TRUE(reader.read(reader.find("large")).equal(large));
  EXPECT_TRUE(reader.read(reader.find("large"), 5, numel - 3).equal(large.narrow(0, 5, numel - 8)));
  const std::string path = scratch / "large/rank_00000.safetensors";
  std::string bytes = contents_of(path);
  const int64_t damaged = kHashedBlockBytes / 4 + 10;  // an element of the second block
  bytes[bytes.size() - static_cast<size_t>(4 * (numel - damaged))] ^= 1;
  overwrite(path, bytes);
  const auto faults = verify_checkpoint(scratch.path());
  ASSERT_EQ(faults.size(), 1u);
  EXPECT_TRUE(contains(faults[0], "'large/param' is damaged")) << faults[0];
  EXPECT_TRUE(contains(faults[0], "elements [2097152, 4194304) was changed")) << faults[0];
  const CheckpointReader again(scratch.path());
  EXPECT_TRUE(again.read(again.find("large"), 0, 2000000).equal(large.narrow(0, 0, 2000000)));  // another block
  EXPECT_TRUE(contains(error_of([&] { again.read(again.find("large")); }), "'large/param' is damaged"));
}

// Each byte of each file, one bit at a time: whatever it is, verify finds it; in a tensor's elements it names the
// tensor, and the load that engines use finds it as well.
TEST(OfflineReader, FindsEveryChangedByte) {
  const Scratch scratch;
  const Tensor vector = at::arange(11, at::kFloat), matrix = at::arange(24, at::kFloat).view({4, 6});
  const std::string folder = save_two_ranks(scratch, vector, matrix);
  EXPECT_TRUE(verify_checkpoint(scratch.path()).empty());
  for (const char* file : {"manifest.json", "rank_00000.safetensors", "rank_00001.safetensors"}) {
    const std::string path = folder + "/" + file;
    const std::string whole_bytes = contents_of(path);
    size_t data_begins = whole_bytes.size();
    if (std::string(file) != "manifest.json") {
      uint64_t length;
      std::memcpy(&length, whole_bytes.data(), 8);
      data_begins = 8 + length;
    }
    for (size_t i = 0; i < whole_bytes.size(); ++i) {
      std::string bytes = whole_bytes;
      bytes[i] = static_cast<char>(bytes[i] ^ (1 << (i % 8)));
      overwrite(path, bytes);
      const auto faults = verify_checkpoint(scratch.path(), "two");
      ASSERT_FALSE(faults.empty()) << file << " byte " << i;
      if (i < data_begins) continue;
      EXPECT_TRUE(faults[0].find("matrix/master") == 1 || faults[0].find("vector/") == 1 ||
                  faults[0].find("seen/") == 1)
          << faults[0];
      const std::string error = error_of([&] {
        std::vector<Piece> wanted;
        const Reader reader(scratch.path(), "two");
        for (Piece piece : reader.table()) {
          piece.data = at::zeros({piece.region.numel()}, piece.data.dtype());
          wanted.push_back(piece);
        }
        reader.read(wanted);
      });
      EXPECT_TRUE(contains(error, "is damaged")) << error;
    }
    overwrite(path, whole_bytes);
  }
  EXPECT_TRUE(verify_checkpoint(scratch.path()).empty());
}

TEST(OfflineReader, NamesTheTensorsOfAFileThatIsMissingOrCut) {
  const Scratch scratch;
  const std::string folder =
      save_two_ranks(scratch, at::arange(11, at::kFloat), at::arange(24, at::kFloat).view({4, 6}));
  const std::string path = folder + "/rank_00001.safetensors";
  const std::string bytes = contents_of(path);
  overwrite(path, bytes.substr(0, bytes.size() - 1));
  std::string faults = verify_checkpoint(scratch.path()).at(0);
  EXPECT_TRUE(contains(faults, "was it truncated?")) << faults;
  EXPECT_TRUE(contains(faults, "(it has 'matrix/master', 'seen/buffer.data=1', 'vector/exp_avg' and 1 more)"))
      << faults;
  remove_quietly(path);
  faults = verify_checkpoint(scratch.path()).at(0);
  EXPECT_TRUE(contains(faults, "cannot open") && contains(faults, "'matrix/master'")) << faults;
  overwrite(folder + "/manifest.json", "{");
  EXPECT_TRUE(contains(verify_checkpoint(scratch.path()).at(0), "malformed " + folder + "/manifest.json"));
}

TEST(OfflineReader, DoesNotCallDamagedWhatAnotherProcessRemovesMeanwhile) {
  const Scratch scratch;
  const std::string folder =
      save_two_ranks(scratch, at::arange(11, at::kFloat), at::arange(24, at::kFloat).view({4, 6}));
  remove_quietly(folder + "/rank_00001.safetensors");
  const std::string error = error_of([&] {
    verify_checkpoint(scratch.path(), "", [&](int64_t, int64_t) { remove_quietly(folder + "/manifest.json"); });
  });
  EXPECT_TRUE(contains(error, "the checkpoint " + folder + " was removed while it was read")) << error;
}

}  // namespace
}  // namespace deeptide::checkpoint
