// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checkpoints that earlier versions wrote, kept as files: every version loads, bit for bit, in any world.
#include "checkpoint/golden.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <filesystem>

#include "checkpoint/format/safetensors.h"
#include "checkpoint/scratch.h"

namespace deeptide::checkpoint {
namespace {

using at::Tensor;

constexpr uint64_t kGoldenNonce = 0x0123456789abcdef;

std::string golden_folder(int version) {
  return std::string(DEEPTIDE_GOLDEN_FOLDER) + "/golden_v" + std::to_string(version);
}

// The save of rank `rank` of two. From version 4 on, what is not trained lies in a file of its own.
Snapshot golden_snapshot(int rank, at::ScalarType weights, int version) {
  Snapshot snapshot{rank, {on_data_axis(rank), golden_rank_state(rank)}, {}};
  for (const GoldenTensor& t : golden_tensors(weights)) {
    const int64_t begin = rank == 0 ? 0 : t.cut, end = rank == 0 ? t.cut : golden_numel(t);
    const Tensor data = golden_data(t);
    const bool columns = t.name == kGoldenBoxes;
    const int64_t half = columns ? t.shape[1] / 2 : 0;
    const Tensor slice = columns ? data.view(t.shape).narrow(1, rank * half, half).contiguous() : Tensor();
    snapshot.pieces.push_back(
        columns ? Piece{t.name, role_of(t.role), t.shape, {{0, rank * half}, {t.shape[0], half}}, slice}
                : range_piece(t.name, t.role, t.shape, begin, end, data.narrow(0, begin, end - begin)));
    snapshot.pieces.back().apart = version >= 4 && t.name == "frozen";
  }
  for (const GoldenTensor& t : golden_buffers()) {
    snapshot.pieces.push_back(
        {t.name, Role::buffer(on_data_axis(rank)), t.shape, Region::range(0, golden_numel(t)), golden_data(t, rank)});
  }
  return snapshot;
}

void save_golden(const std::string& directory, const std::string& tag, at::ScalarType weights, int version) {
  const SaveTarget target{directory, tag, kGoldenNonce};
  for (int rank = 0; rank < 2; ++rank) write_rank(target, golden_snapshot(rank, weights, version));
  commit(target, {.world_size = 2, .state_json = kGoldenState, .client_state_json = kGoldenClientState}, false);
}

struct Golden {
  int version;
  const char* tag;
  at::ScalarType weights;
};

class GoldenCheckpoint : public ::testing::TestWithParam<Golden> {};

TEST_P(GoldenCheckpoint, LoadsBitForBitInEveryWorld) {
  const auto [version, tag, weights] = GetParam();
  const Reader reader(golden_folder(version), tag);
  EXPECT_EQ(reader.manifest().version, version);
  EXPECT_EQ(reader.manifest().world_size, 2);
  EXPECT_EQ(reader.manifest().state_json, kGoldenState);
  EXPECT_EQ(reader.manifest().client_state_json, kGoldenClientState);
  for (int world = 1; world <= 3; ++world) {
    for (int rank = 0; rank < world; ++rank) {
      std::vector<Piece> wanted;
      std::vector<Tensor> expected;
      for (const GoldenTensor& t : golden_tensors(weights)) {
        const int64_t chunk = (golden_numel(t) + world - 1) / world;
        const int64_t begin = std::min(rank * chunk, golden_numel(t)), end = std::min(begin + chunk, golden_numel(t));
        expected.push_back(golden_data(t).narrow(0, begin, end - begin));
        wanted.push_back(range_piece(t.name, t.role, t.shape, begin, end, at::zeros({end - begin}, t.dtype)));
      }
      const int owner = rank < 2 ? rank : 0;  // a rank that did not save takes what the first one saved
      for (const GoldenTensor& t : golden_buffers()) {
        expected.push_back(golden_data(t, owner));
        wanted.push_back({t.name, Role::buffer(on_data_axis(owner)), t.shape, Region::range(0, golden_numel(t)),
                          at::zeros({golden_numel(t)}, t.dtype)});
      }
      std::set<TensorId> ignored;
      for (const GoldenTensor& t : golden_buffers()) {
        ignored.insert({t.name, Role::buffer(on_data_axis(1 - owner))});
      }
      EXPECT_EQ(reader.check(wanted, true, ignored), std::vector<std::string>{});
      EXPECT_EQ(reader.check(wanted, true).size(), golden_buffers().size());
      reader.read(wanted);
      for (size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_TRUE(same_bits(wanted[i].data.tensor(), expected[i])) << wanted[i].name << "/" << wanted[i].role.text();
      }
      EXPECT_EQ(reader.rank_state_json(on_data_axis(rank)), rank < 2 ? golden_rank_state(rank) : "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Versions, GoldenCheckpoint,
                         ::testing::Values(Golden{1, "fp32", at::kFloat}, Golden{1, "bf16", at::kBFloat16},
                                           Golden{2, "fp32", at::kFloat}, Golden{2, "bf16", at::kBFloat16},
                                           Golden{3, "fp32", at::kFloat}, Golden{3, "bf16", at::kBFloat16},
                                           Golden{4, "fp32", at::kFloat}, Golden{4, "bf16", at::kBFloat16}),
                         [](const auto& info) {
                           return "V" + std::to_string(info.param.version) + "_" + info.param.tag;
                         });

// The files that are written today, byte for byte: a change of the format needs a new version, and golden files of it.
// A save that shares no file is of version 3, which older programs read.
TEST(Golden, WritesBothCurrentVersionsByteForByte) {
  for (const int version : {3, kManifestVersion}) {
    Scratch scratch;
    for (const auto& [tag, weights] : {std::pair{"fp32", at::kFloat}, {"bf16", at::kBFloat16}}) {
      save_golden(scratch.path(), tag, weights, version);
      const std::string kept = golden_folder(version) + "/" + tag;
      std::vector<std::string> names = list_folder(kept), written = list_folder(scratch / tag);
      std::sort(names.begin(), names.end());
      std::sort(written.begin(), written.end());
      EXPECT_EQ(written, names);
      EXPECT_EQ(names.size(), version == 3 ? 3u : 4u);
      for (const std::string& name : names) {
        EXPECT_EQ(read_text(scratch / tag + "/" + name), read_text(kept + "/" + name)) << name;
      }
    }
  }
}

// For the first commit of a new version, with --gtest_also_run_disabled_tests.
TEST(Golden, DISABLED_MakeTheCurrentVersion) {
  ASSERT_FALSE(exists(golden_folder(kManifestVersion))) << "golden files of a released version stay as they are";
  save_golden(golden_folder(kManifestVersion), "fp32", at::kFloat, kManifestVersion);
  save_golden(golden_folder(kManifestVersion), "bf16", at::kBFloat16, kManifestVersion);
}

}  // namespace
}  // namespace deeptide::checkpoint
