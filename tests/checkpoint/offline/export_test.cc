// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Exports, comparisons and what prune keeps.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "checkpoint/offline/conversion.h"
#include "checkpoint/offline/writers/selection.h"
#include "checkpoint/scratch.h"
#include "deeptide/checkpoint.h"
#include "deeptide/weights.h"

namespace deeptide::checkpoint {
namespace {

using at::Tensor;

std::vector<Piece> small_model() {
  return {whole("a", "master", at::arange(1000, at::kFloat).div(3)),
          whole("a", "exp_avg", at::ones({1000})),
          whole("b", "param", at::full({10}, 2.5, at::kFloat)),  // frozen
          whole("c", "master", at::arange(600, at::kFloat).mul(-7)),
          whole("mask", "buffer", at::ones({3}, at::kBool)),
          whole("d", "master", at::zeros({0}))};
}

TEST(Export, WritesSafetensorsThatWeightFileReads) {
  const Scratch scratch;
  save(scratch.path(), "one", small_model());
  const CheckpointReader reader(scratch.path());
  EXPECT_EQ(export_checkpoint(reader, scratch / "out"), (std::vector<std::string>{"model.safetensors"}));
  const WeightFile file(scratch / "out");
  EXPECT_EQ(file.names(), (std::vector<std::string>{"a", "b", "c", "d", "mask"}));
  for (const std::string& name : file.names()) {
    EXPECT_TRUE(same_bits(file.tensor(name), reader.read(reader.find(name)))) << name;
  }
  export_checkpoint(reader, scratch / "trained", {.exclude_frozen = true});
  EXPECT_EQ(WeightFile(scratch / "trained").names(), (std::vector<std::string>{"a", "c", "d", "mask"}));
}

TEST(Export, CutsFilesAtASizeAndLeavesNoneOfAFormerExport) {
  const Scratch scratch;
  save(scratch.path(), "one", small_model());
  const CheckpointReader reader(scratch.path());
  export_checkpoint(reader, scratch / "out");
  const auto names = export_checkpoint(reader, scratch / "out", {.max_shard_size = "2410"});
  EXPECT_EQ(names, (std::vector<std::string>{"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                                             "model-00003-of-00003.safetensors", "model.safetensors.index.json"}));
  auto left = list_folder(scratch / "out");
  std::sort(left.begin(), left.end());
  EXPECT_EQ(left, names);
  const auto index = nlohmann::json::parse(read_text(scratch / "out/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 4 * 1610 + 3);
  EXPECT_EQ(index["weight_map"]["a"], names[0]);
  EXPECT_TRUE(WeightFile(scratch / "out").tensor("c").equal(at::arange(600, at::kFloat).mul(-7)));
}

// Every pattern of 16 bits, and fp32 around each: rounding, NaN and infinity are torch's.
TEST(Export, ConvertsAsTorchDoes) {
  const Tensor patterns = at::arange(65536, at::kInt).to(at::kShort);
  std::vector<Tensor> inputs;
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    const Tensor all = patterns.view(type);
    inputs.push_back(all);
    inputs.push_back(all.to(at::kFloat));
    inputs.push_back(all.to(at::kFloat).mul(1.0003));
    inputs.push_back(all.to(at::kDouble).mul(0.9998));
  }
  for (const Tensor& input : inputs) {
    for (const auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
      const Tensor expected = input.to(type);
      Tensor out = at::zeros({input.numel()}, type);
      convert(input.scalar_type(), static_cast<const char*>(input.const_data_ptr()), type,
              static_cast<char*>(out.mutable_data_ptr()), input.numel());
      EXPECT_TRUE(out.isnan().equal(expected.isnan()));
      EXPECT_TRUE(same_bits(out.nan_to_num(0), expected.nan_to_num(0))) << input.scalar_type() << " to " << type;
    }
  }
}

TEST(Export, ReadsSizesAsHuggingFaceWritesThem) {
  EXPECT_EQ(parse_shard_size("5GB"), 5'000'000'000);
  EXPECT_EQ(parse_shard_size("1.5 KB"), 1500);
  EXPECT_EQ(parse_shard_size("2GiB"), int64_t{2} << 30);
  EXPECT_EQ(parse_shard_size("10mb"), 10'000'000);
  EXPECT_EQ(parse_shard_size("7"), 7);
  EXPECT_EQ(parse_shard_size(""), 0);
  for (const char* wrong : {"5 parsecs", "GB", "-3GB", "0", "1e400", "5 5GB", "nan"}) {
    EXPECT_THROW(parse_shard_size(wrong), ConfigError) << wrong;
  }
}

/// Two trained parameters, one frozen, a buffer; after a step that was skipped.
void save_trained(const Scratch& scratch) {
  const Tensor one = at::arange(1000, at::kFloat).div(3), other = at::arange(600, at::kFloat).mul(-7);
  const nlohmann::json state{{"optimizer", "AdamW"},
                             {"groups", {{{"lr", 0.1}, {"beta1", 0.9}, {"beta2", 0.95}}}},
                             {"global_steps", 7},
                             {"skipped_steps", 1},
                             {"optimizer_steps", 6}};
  save(scratch.path(), "one",
       {whole("a", "master", one), whole("a", "param", one.to(at::kBFloat16)), whole("a", "exp_avg", one.add(1)),
        whole("a", "exp_avg_sq", one.add(2)), whole("b", "param", at::full({10}, 2.5, at::kFloat)),
        whole("c", "master", other), whole("c", "param", other.to(at::kBFloat16)), whole("c", "exp_avg", other.add(1)),
        whole("c", "exp_avg_sq", other.add(2)), whole("mask", "buffer", at::ones({3}, at::kBool))},
       {.state_json = state.dump(),
        .client_state_json = R"({"epoch": -3, "seed": 1e300, "text": "ü", "big": 6000000000})"});
}

TEST(Export, WritesAUniversalFolderThatImportReads) {
  const Scratch scratch;
  save_trained(scratch);
  const CheckpointReader reader(scratch.path());
  EXPECT_EQ(param_groups_json(reader), R"([{"betas":[0.9,0.95],"lr":0.1}])");
  const ExportOptions universal{.format = ExportFormat::universal};
  const std::vector<std::string> names{"one", "latest_universal"};
  EXPECT_EQ(export_checkpoint(reader, scratch / "out", universal), names);
  EXPECT_EQ(export_checkpoint(reader, scratch / "out", universal), names);  // over the former one
  import_checkpoint(scratch / "out", scratch / "back");
  const CheckpointReader back(scratch / "back");
  EXPECT_EQ(back.global_steps(), reader.global_steps());
  EXPECT_EQ(nlohmann::json::parse(back.state_json())["global_steps"], 7);
  EXPECT_EQ(nlohmann::json::parse(back.state_json())["optimizer_steps"], 6);
  auto client_state = nlohmann::json::parse(back.client_state_json());
  client_state.erase("__deeptide__");  // where it came from
  EXPECT_EQ(client_state, nlohmann::json::parse(reader.client_state_json()));
  for (const CheckpointTensor& tensor : reader.tensors()) {
    if (tensor.dtype == "BF16") continue;  // the copy that computed is made of the master
    EXPECT_TRUE(same_bits(back.read(back.find(tensor.name, tensor.role)), reader.read(tensor))) << tensor.name;
  }
  EXPECT_THROW(export_checkpoint(reader, scratch / "out", {.format = ExportFormat::universal, .dtype = "bf16"}),
               ConfigError);
}

int refuses(const char* action, const std::string& path, const char* end) {
  return std::string(action) == "flush" && path.ends_with(end) ? ENOSPC : 0;
}

// Torch itself reads what it holds in tests/python/checkpoint/test_offline.py.
TEST(Export, WritesADistributedCheckpointOrLeavesTheFormerOne) {
  const Scratch scratch;
  save_trained(scratch);
  const CheckpointReader reader(scratch.path());
  const ExportOptions dcp{.format = ExportFormat::dcp};
  const std::vector<std::string> names{".metadata", "__0_0.distcp"};
  int64_t done = 0, all = 0;
  const auto note = [&](int64_t bytes, int64_t total) { done = bytes, all = total; };
  EXPECT_EQ(export_checkpoint(reader, scratch / "out", dcp, note), names);
  EXPECT_EQ(done, all);
  EXPECT_EQ(all, 4 * (3 * 1000 + 10 + 3 * 600) + 3) << "masters, moments, a frozen weight and a mask";
  EXPECT_EQ(export_checkpoint(reader, scratch / "out", dcp), names);  // over the former one
  const std::string data = read_text(scratch / "out/__0_0.distcp"), metadata = read_text(scratch / "out/.metadata");
  save(scratch.path(), "one", {whole("a", "param", at::zeros({3}))});
  const CheckpointReader other(scratch.path());
  for (const auto refuse :
       {+[](const char* action, const std::string& path) { return refuses(action, path, ".distcp"); },
        +[](const char* action, const std::string& path) { return refuses(action, path, "data"); }}) {
    refuse_with(refuse);
    EXPECT_THROW(export_checkpoint(other, scratch / "out", dcp), CheckpointError);
    refuse_with(nullptr);
    EXPECT_EQ(list_folder(scratch / "out").size(), names.size());  // no part of the second
    EXPECT_EQ(read_text(scratch / "out/__0_0.distcp"), data);
    EXPECT_EQ(read_text(scratch / "out/.metadata"), metadata);
  }
}

TEST(Export, LeavesAFormerUniversalFolderWholeWhereItFails) {
  const Scratch scratch;
  save_trained(scratch);
  const CheckpointReader reader(scratch.path());
  const ExportOptions universal{.format = ExportFormat::universal};
  export_checkpoint(reader, scratch / "out", universal);
  refuse_with([](const char* action, const std::string& path) { return refuses(action, path, "optimizer_state.pt"); });
  EXPECT_THROW(export_checkpoint(reader, scratch / "out", universal), CheckpointError);
  refuse_with(nullptr);
  EXPECT_EQ(list_folder(scratch / "out").size(), 3);  // no part of the second
  import_checkpoint(scratch / "out", scratch / "back");
}

TEST(Export, RefusesWhatItCannotWrite) {
  const Scratch scratch;
  save(scratch.path(), "one", {whole("odd", "param", at::zeros({2}, at::kUInt16))});
  const CheckpointReader reader(scratch.path());
  EXPECT_THROW(export_checkpoint(reader, scratch / "out", {.dtype = "int8"}), ConfigError);
  const std::string error =
      error_of([&] { export_checkpoint(reader, scratch / "out", {.format = ExportFormat::state_dict}); });
  EXPECT_TRUE(contains(error, "torch has no storage for U16; export safetensors")) << error;
  EXPECT_TRUE(list_folder(scratch / "out").empty());
}

using Kind = CheckpointDifference::Kind;

TEST(Difference, ListsWhatIsUnequal) {
  const Scratch scratch;
  save(scratch.path(), "one", small_model());
  std::vector<Piece> other = small_model();
  Tensor changed = other[0].data.tensor().clone();
  changed[3] = 100.0;
  changed[4] = std::numeric_limits<double>::quiet_NaN();
  other[0].data = changed;
  other[2] = whole("b", "param", at::full({10}, 2.5, at::kHalf));  // equal values of another type
  other[3] = whole("c", "master", at::zeros({599}));
  other[4] = whole("new", "buffer", at::ones({3}, at::kBool));
  save(scratch.path(), "two", other);
  const CheckpointReader first(scratch.path(), "one"), second(scratch.path(), "two");
  EXPECT_TRUE(compare_checkpoints(first, first).empty());
  const auto found = compare_checkpoints(first, second);
  ASSERT_EQ(found.size(), 5u);
  EXPECT_EQ(found[0].kind, Kind::values);
  EXPECT_EQ(found[0].num_different, 2);
  EXPECT_DOUBLE_EQ(found[0].max_difference, 99.0);
  EXPECT_EQ(found[1].kind, Kind::dtype);
  EXPECT_EQ(found[1].first + found[1].second, "F32F16");
  EXPECT_EQ(found[1].num_different, 0);
  EXPECT_EQ(found[2].kind, Kind::shape);
  EXPECT_EQ(found[3].name, "mask");
  EXPECT_EQ(found[3].kind, Kind::only_first);
  EXPECT_EQ(found[4].name, "new");
  EXPECT_EQ(found[4].kind, Kind::only_second);
}

TEST(Statistics, SayWhatATensorIsLike) {
  const Scratch scratch;
  Tensor values = at::arange(5, at::kFloat);
  values[4] = std::numeric_limits<double>::infinity();
  save(scratch.path(), "one", {whole("a", "param", values)});
  const CheckpointReader reader(scratch.path());
  const auto statistics = checkpoint_statistics(reader, reader.find("a"));
  EXPECT_EQ(statistics.least, 0.0);
  EXPECT_EQ(statistics.most, 3.0);
  EXPECT_EQ(statistics.mean, 1.5);
  EXPECT_DOUBLE_EQ(statistics.norm, std::sqrt(14.0));
  EXPECT_EQ(statistics.num_others, 1);
  EXPECT_EQ(statistics.first.size(), 5u);
}

void save_steps(const Scratch& scratch, const std::string& tag, int64_t steps) {
  write_rank(scratch.path(), tag, 0, {whole("a", "param", at::ones({2}))}, "{}");
  commit(scratch.path(), tag, Manifest{.state_json = R"({"global_steps": )" + std::to_string(steps) + "}"}, false);
}

TEST(Prune, KeepsTheLastMultiplesTheLatestAndWhatIsNoCheckpoint) {
  const Scratch scratch;
  for (const int64_t steps : {10, 20, 30, 40, 50, 60}) save_steps(scratch, "step" + std::to_string(steps), steps);
  write_text(scratch / "latest", "step10\n");
  make_folders(scratch / "logs");
  overwrite(scratch / "step20/manifest.json", "{}");
  const PruneOptions options{.keep_last = 2, .keep_every = 40, .dry_run = true};
  EXPECT_EQ(prune_checkpoints(scratch.path(), options), (std::vector<std::string>{"step30"}));
  EXPECT_TRUE(exists(scratch / "step30"));
  EXPECT_EQ(prune_checkpoints(scratch.path(), {.keep_last = 2, .keep_every = 40}),
            (std::vector<std::string>{"step30"}));
  std::vector<std::string> left = list_folder(scratch.path());
  std::sort(left.begin(), left.end());
  EXPECT_EQ(left, (std::vector<std::string>{"latest", "logs", "step10", "step20", "step40", "step50", "step60"}));
  EXPECT_THROW(prune_checkpoints(scratch.path(), {.keep_last = 0}), ConfigError);
  EXPECT_THROW(prune_checkpoints(scratch.path(), {.keep_last = 1, .keep_every = -1}), ConfigError);
}

TEST(List, ShowsStepsSizesAndFaults) {
  const Scratch scratch;
  save_steps(scratch, "b", 20);
  save_steps(scratch, "a", 10);
  save_steps(scratch, "broken", 30);
  overwrite(scratch / "broken/manifest.json", "[]");
  write_text(scratch / "latest", "b");
  const auto found = list_checkpoints(scratch.path());
  ASSERT_EQ(found.size(), 3u);
  EXPECT_TRUE(contains(found[0].fault, "it is not a JSON object"));
  EXPECT_EQ(found[1].tag, "a");
  EXPECT_EQ(found[2].tag, "b");
  EXPECT_TRUE(found[2].is_latest && !found[1].is_latest);
  EXPECT_EQ(found[2].bytes, 8);
  EXPECT_TRUE(found[2].has_hashes);
}

}  // namespace
}  // namespace deeptide::checkpoint
