// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Whatever happens to a checkpoint's files, loading gives the right data or a CheckpointError.
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "checkpoint/format/file_io.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/scratch.h"

namespace deeptide::checkpoint {
namespace {

using at::Tensor;
using nlohmann::json;

constexpr int64_t kCorruptNumel = 24;

// Two ranks, two tensors, one cut in three: w[0, 5) w[9, 24) and v on rank 0, w[5, 9) on rank 1.
class Corruption : public ::testing::Test {
 protected:
  Corruption() : w_(at::arange(kCorruptNumel, at::kFloat)), v_(at::arange(kCorruptNumel, at::kLong)) {
    const auto part = [&](int64_t begin, int64_t end) {
      return range_piece("w", "param", {4, 6}, begin, end, w_.narrow(0, begin, end - begin));
    };
    write_rank(scratch_.path(), "t", 0, {part(0, 5), part(9, kCorruptNumel), whole("v", "buffer", v_)}, "{}");
    write_rank(scratch_.path(), "t", 1, {part(5, 9)}, "{}");
    commit(scratch_.path(), "t", {.world_size = 2}, true);
    shard_ = read_text(shard_path_);
    manifest_ = read_text(manifest_path_);
  }

  // True when both tensors came back right; false for a CheckpointError. Anything else fails the test.
  bool loads() {
    const Tensor w = at::zeros({kCorruptNumel}, at::kFloat);
    const Tensor v = at::zeros({kCorruptNumel}, at::kLong);
    try {
      Reader(scratch_.path(), "t")
          .read({range_piece("w", "param", {4, 6}, 0, kCorruptNumel, w), whole("v", "buffer", v)});
    } catch (const CheckpointError&) {
      return false;
    }
    EXPECT_TRUE(same_bits(w, w_) && same_bits(v, v_)) << "wrong data was loaded without an error";
    return true;
  }

  std::string open_error() {
    return error_of([&] { Reader(scratch_.path(), "t"); });
  }

  struct ManifestCase {
    std::function<void(json&)> change;
    const char* why;
  };

  // Each change must end in an error that names the checkpoint and says why.
  void expect_refused(const std::vector<ManifestCase>& cases) {
    for (const auto& [change, why] : cases) {
      json changed = json::parse(manifest_);
      change(changed);
      for (const char* guard : {"checksum", "hash", "header_hashes"}) changed.erase(guard);  // they would tell first
      overwrite(manifest_path_, changed.dump());
      const std::string text = open_error();
      EXPECT_TRUE(contains(text, why) && contains(text, scratch_ / "t")) << text << "\nexpected: " << why;
    }
  }

  Scratch scratch_;
  const Tensor w_;
  const Tensor v_;
  const std::string shard_path_ = scratch_ / "t/rank_00000.safetensors";
  const std::string manifest_path_ = scratch_ / "t/manifest.json";
  std::string shard_;
  std::string manifest_;
};

// Flips, overwrites, inserts or removes a few bytes within the first `size`.
std::string corrupt(std::string bytes, size_t size, std::mt19937& random) {
  const auto draw = [&](size_t below) { return std::uniform_int_distribution<size_t>(0, below - 1)(random); };
  static constexpr char kTelling[] = "0123456789\"[]{}:,-.eE \0\xff\\";
  for (size_t i = 1 + draw(3); i > 0; --i) {
    const size_t at = draw(std::min(size, bytes.size()));
    switch (draw(5)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << draw(8)));
        break;
      case 1:
        bytes[at] = kTelling[draw(sizeof(kTelling) - 1)];
        break;
      case 2:
        bytes[at] = static_cast<char>(draw(256));
        break;
      case 3:
        bytes.insert(at, 1, kTelling[draw(sizeof(kTelling) - 1)]);
        break;
      default:
        bytes.erase(at, 1 + draw(4));
    }
  }
  return bytes;
}

TEST_F(Corruption, NeverLoadsWrongDataFromADamagedShardHeader) {
  uint64_t header_bytes;
  std::memcpy(&header_bytes, shard_.data(), 8);
  std::mt19937 random(1);
  int refused = 0;
  for (int round = 0; round < 1500; ++round) {
    overwrite(shard_path_, corrupt(shard_, 8 + header_bytes, random));
    refused += loads() ? 0 : 1;
    if (HasFailure()) FAIL() << "round " << round;
  }
  EXPECT_GT(refused, 1000);
  overwrite(shard_path_, shard_);
  EXPECT_TRUE(loads());
}

TEST_F(Corruption, NeverLoadsWrongDataFromADamagedManifest) {
  std::mt19937 random(2);
  int refused = 0;
  for (int round = 0; round < 1500; ++round) {
    overwrite(manifest_path_, corrupt(manifest_, manifest_.size(), random));
    refused += loads() ? 0 : 1;
    if (HasFailure()) FAIL() << "round " << round;
  }
  EXPECT_GT(refused, 500);
}

TEST_F(Corruption, RefusesAShardOfAnyOtherLength) {
  for (size_t length = 0; length < shard_.size(); length += 7) {
    overwrite(shard_path_, shard_.substr(0, length));
    EXPECT_FALSE(loads()) << length;
    EXPECT_TRUE(contains(open_error(), shard_path_));
  }
  overwrite(shard_path_, shard_ + "x");
  EXPECT_FALSE(loads());
}

TEST_F(Corruption, NamesTheShardThatIsMissing) {
  remove_quietly(shard_path_);
  const std::string text = open_error();
  EXPECT_TRUE(contains(text, shard_path_) && contains(text, "No such file")) << text;
}

TEST_F(Corruption, SeesAShardOfAnotherSave) {
  const Tensor longer = at::arange(48, at::kFloat);
  write_rank(scratch_.path(), "u", 0, {whole("w", "param", longer)}, "{}");
  commit(scratch_.path(), "u", {}, true);
  overwrite(shard_path_, read_text(scratch_ / "u/rank_00000.safetensors"));
  EXPECT_TRUE(contains(open_error(), "the shard is of another save"));
}

TEST_F(Corruption, SeesAShardOfAnotherSaveWithTheSameLayout) {
  const SaveTarget other{scratch_.path(), "u", kNonce + 1};
  write_rank(other, {0,
                     {},
                     {range_piece("w", "param", {4, 6}, 0, 5, w_.narrow(0, 0, 5)),
                      range_piece("w", "param", {4, 6}, 9, kCorruptNumel, w_.narrow(0, 9, kCorruptNumel - 9)),
                      whole("v", "buffer", v_.add(1))}});
  commit(other, {}, true);
  const std::string shard = read_text(scratch_ / "u/rank_00000.safetensors");
  ASSERT_EQ(shard.size(), shard_.size());
  overwrite(shard_path_, shard);
  EXPECT_TRUE(contains(open_error(), "the shard is of another save"));
}

TEST_F(Corruption, RefusesAManifestThatMakesNoSense) {
  expect_refused({
      {[](json& m) { m["version"] = 5; }, "has version 5, this Deeptide reads up to 4; load it with a newer Deeptide"},
      {[](json& m) { m["version"] = 0; }, "contradicts the rest"},
      {[](json& m) { m["version"] = 1.5; }, "expected an integer, got a number"},
      {[](json& m) { m["format"] = "other"; }, "not a Deeptide manifest"},
      {[](json& m) { m.erase("format"); }, "format"},
      {[](json& m) { m.erase("tensors"); }, "tensors"},
      {[](json& m) { m["tensors"] = json::object(); }, "'tensors' is not a list"},
      {[](json& m) { m["world_size"] = 3; }, "contradicts the rest"},
      {[](json& m) { m["state"] = 3; }, "type must be string"},
      {[](json& m) {
         m["rank_states"] = {1, 2};
       },
       "cannot use at() with number"},
      {[](json& m) { m["rank_states"][1]["state"] = 1; }, "type must be string"},
      {[](json& m) { m["rank_states"][1]["coordinates"] = 1; }, "'coordinates' is not an object"},
      {[](json& m) { m["rank_states"][1]["coordinates"]["data"] = 0; }, "two ranks are at origin"},
      {[](json& m) { m["rank_states"][1]["coordinates"]["data"] = -1; }, "'data=-1' is not a mesh coordinate"},
      {[](json& m) { m["save"] = 5; }, "type must be string"},
      {[](json& m) { m["save"] = "0123456789abcdef"; }, "the shard is of another save"},
  });
}

TEST_F(Corruption, RefusesTensorsThatMakeNoSense) {
  expect_refused({
      {[](json& m) { m["tensors"][0]["role"] = "odd"; }, "role 'odd' is not known"},
      {[](json& m) { m["tensors"][1]["role"] = "moment"; }, "'moment' not found"},
      {[](json& m) {
         m["tensors"][1]["role"] = "moment";
         m["tensors"][1]["moment"] = "a/b";
       },
       "'a/b' cannot name an optimizer moment"},
      {[](json& m) { m["tensors"].push_back(m["tensors"][0]); }, "is there twice"},
      {[](json& m) {
         m["tensors"][0]["shape"] = {-4, 6};
       },
       "shape is not possible"},
      {[](json& m) { m["tensors"][0]["shape"] = {3}; }, "beyond shape (3)"},
      {[](json& m) { m["tensors"][0]["dtype"] = "F31"; }, "dtype 'F31' is not known"},
      {[](json& m) { m["tensors"][0]["dtype"] = "F64"; }, "not where manifest.json expects"},
      {[](json& m) { m["tensors"][1]["pieces"][1]["offsets"] = {4}; }, "is in two pieces, [0, 5) and [4, 8)"},
      {[](json& m) { m["tensors"][1]["pieces"][0]["sizes"] = {0}; }, "no valid region"},
      {[](json& m) { m["tensors"][1]["pieces"][0]["offsets"] = {-1}; }, "no valid region"},
      {[](json& m) {
         m["tensors"][1]["pieces"][0]["sizes"] = {1, 5};
       },
       "no valid region"},
      {[](json& m) {
         m["tensors"][1]["pieces"][0]["offsets"] = {0, 0};
         m["tensors"][1]["pieces"][0]["sizes"] = {1, 5};
       },
       "not where manifest.json expects"},
      {[](json& m) {
         m["tensors"][1]["pieces"][0]["offsets"] = {0, 2};
         m["tensors"][1]["pieces"][0]["sizes"] = {1, 5};
       },
       "the piece [0:1, 2:7] of 'w/param' is beyond shape (4, 6)"},
      {[](json& m) { m["tensors"][1]["pieces"][0]["sizes"] = {1ull << 63}; }, "expected an integer"},
      {[](json& m) { m["tensors"][1]["pieces"][0]["offset"] = 0; }, "not where manifest.json expects"},
      {[](json& m) { m["tensors"][1]["pieces"][0]["file"] = "../t/rank_00000.safetensors"; }, "is not a file name"},
      {[](json& m) { m["tensors"][1]["pieces"][0]["file"] = "absent.safetensors"; }, "No such file"},
  });
}

}  // namespace
}  // namespace deeptide::checkpoint
