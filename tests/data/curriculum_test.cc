// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Schedules beside their formulas, index files there and back, samplers and batches with what they refuse.
// tests/python/efficiency compares all of them with what DeepSpeed gave.
#include <ATen/Context.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "data/numpy_random.h"
#include "deeptide/curriculum_sampler.h"
#include "deeptide/indexed_dataset.h"
#include "deeptide/length_batches.h"

namespace deeptide {
namespace {

namespace fs = std::filesystem;

/// A folder of this test, gone with it.
class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("deeptide_curriculum_" + std::to_string(::getpid()))) {
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  fs::path path_;
};

template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "none";
}

void expect_error(const std::string& error, const std::string& part) {
  EXPECT_NE(error.find(part), std::string::npos) << error;
}

TEST(CurriculumSchedule, GrowsByARootAndStaysAtItsEnd) {
  auto schedule = CurriculumSchedule::from_text(
      R"({"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_root",
          "schedule_config": {"total_curriculum_step": 16, "difficulty_step": 8, "root_degree": 2}})");
  EXPECT_EQ(schedule.at(1), 16);  // 8 + 1/4 * 56 = 22
  EXPECT_EQ(schedule.at(4), 32);  // 8 + 1/2 * 56 = 36
  EXPECT_EQ(schedule.update(100), 64);
  EXPECT_EQ(schedule.update(1), 64);
  schedule.set_current(8);
  EXPECT_EQ(schedule.update(4), 32);
}

TEST(CurriculumSchedule, BeginsAtTheFirstMultipleThatIsNotBelowItsMinimum) {
  const auto schedule = CurriculumSchedule::from_text(
      R"({"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear",
          "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 16}})");
  EXPECT_EQ(schedule.at(1), 16);
}

TEST(CurriculumSchedule, NamesWhatIsWrong) {
  const auto of = [](const std::string& text) { return error_of([&] { CurriculumSchedule::from_text(text, "c"); }); };
  expect_error(of("{}"), "c.min_difficulty: missing");
  expect_error(of(R"({"min_difficulty": 1.5})"), "c.min_difficulty: got 1.5, expected an integer");
  expect_error(of(R"({"min_difficulty": 1, "max_difficulty": 2, "schedule_type": "steep"})"), "got \"steep\"");
  expect_error(of(R"({"min_difficulty": 1, "max_difficulty": 2, "schedule_type": "fixed_linear",
                      "schedule_config": {"total_curriculum_step": 0, "difficulty_step": 1}})"),
               "c.schedule_config.total_curriculum_step: got 0, expected at least 1");
  auto linear = CurriculumSchedule::from_text(
      R"({"min_difficulty": 1, "max_difficulty": 2, "schedule_type": "fixed_linear",
          "schedule_config": {"total_curriculum_step": 1, "difficulty_step": 1}})");
  expect_error(error_of([&] { linear.set_function([](int64_t step) { return step; }); }), "that is not \"custom\"");
}

TEST(RandomLtdSchedule, CountsAStepOnce) {
  RandomLtdSchedule schedule(
      {.total_layers = 4, .dropping_layers = 2, .min_length = 2, .max_length = 8, .steps = 6, .global_batch = 3});
  EXPECT_EQ(schedule.layer_tokens_after(2), 3 * (2 * 2 + 8 * 2) + 3 * (3 * 2 + 8 * 2));
  EXPECT_EQ(schedule.update(1), 3);
  schedule.update(1);
  EXPECT_EQ(schedule.position().layer_tokens, 3 * (3 * 2 + 8 * 2));
  expect_error(error_of([] { RandomLtdSchedule({.total_layers = 4, .dropping_layers = 5}); }),
               "random_ltd_layer_num is 5, expected 0 to 4");
}

TEST(ProgressiveLayerDrop, KeepsFewerLayersTheDeeperTheyAre) {
  ProgressiveLayerDrop drop(0.5, 0.1);
  EXPECT_EQ(drop.current(), 1.0);
  drop.update(3);
  EXPECT_EQ(drop.current(), 0.5 * std::exp(-0.1 * 3.0) + 0.5);
  EXPECT_EQ(ProgressiveLayerDrop::keep_probability(0, 4, 0.5), 1.0);
  EXPECT_EQ(ProgressiveLayerDrop::keep_probability(3, 4, 0.5), 0.625);
  expect_error(error_of([] { ProgressiveLayerDrop::keep_probability(4, 4, 0.5); }), "layer 4 of 4");
  expect_error(error_of([] { ProgressiveLayerDrop(1.5); }), "theta is 1.5");
  expect_error(error_of([] { ProgressiveLayerDrop(0.5, std::nan("")); }), "expected at least 0");
}

TEST(ProgressiveLayerDrop, DrawsByTorchsGeneratorOfTheCpu) {
  ProgressiveLayerDrop drop(0.0, 100.0);
  at::manual_seed(5);
  const double first = at::rand({}).item<double>();
  at::manual_seed(5);
  EXPECT_FALSE(drop.drops(3, 4)) << "before the first update";
  drop.update(1);
  EXPECT_FALSE(drop.drops(0, 4)) << "the first layer always runs";
  EXPECT_EQ(drop.drops(3, 4), first >= 0.25) << "neither of them has drawn";
  int64_t dropped = 0;
  for (int i = 0; i < 4000; ++i) dropped += drop.drops(2, 4) ? 1 : 0;
  EXPECT_NEAR(static_cast<double>(dropped) / 4000, 0.5, 0.03);
}

TEST(Schedules, GoOnWhereAClientStateWas) {
  RandomLtdSchedule tokens(
      {.total_layers = 4, .dropping_layers = 2, .min_length = 2, .max_length = 8, .steps = 6, .global_batch = 3});
  ProgressiveLayerDrop layers(0.5, 0.25);
  RandomLtdSchedule other_tokens = tokens;
  ProgressiveLayerDrop other_layers = layers;
  for (int64_t step = 0; step < 3; ++step) tokens.update(step), layers.update(step);
  const std::string state = layers.add_state(tokens.add_state(R"({"epoch": 2})"));
  EXPECT_EQ(state, R"({"epoch":2,"__deeptide__":{"less_work":{"tokens":[2,4,198],"layers":0.8032653298563167}}})")
      << "as Python's engine writes it";
  EXPECT_TRUE(other_tokens.take_state(state) && other_layers.take_state(state));
  EXPECT_EQ(other_tokens.update(3), tokens.update(3));
  EXPECT_EQ(other_tokens.position().layer_tokens, tokens.position().layer_tokens);
  EXPECT_EQ(other_layers.current(), layers.current());
  EXPECT_FALSE(other_tokens.take_state("{}"));
  expect_error(error_of([&] { other_tokens.add_state("[]"); }), "the client state is '[]', expected a JSON object");
  expect_error(error_of([&] { other_tokens.take_state(R"({"__deeptide__": {"less_work": {"tokens": [1]}}})"); }),
               "the client state's less_work/tokens cannot be read");
}

// By numpy 2.4.6: two calls of default_rng(7).random(), and default_rng(7).shuffle of 0 … 7.
TEST(NumpyRandom, DrawsNumpysNumbers) {
  data::NumpyRandom random(7);
  EXPECT_EQ(random.next_double(), 0.625095466604667);
  EXPECT_EQ(random.next_double(), 0.8972138009695755);
  data::NumpyRandom again(7);
  std::vector<int> order(8);
  std::iota(order.begin(), order.end(), 0);
  again.shuffle(order);
  EXPECT_EQ(order, (std::vector<int>{0, 6, 7, 2, 4, 5, 1, 3}));
}

TEST(NumpyRandom, BoundsNumbersBeyond32Bits) {
  data::NumpyRandom random(1);
  const uint64_t last = uint64_t{5} << 33;
  bool large = false;
  for (int i = 0; i < 100; ++i) {
    const uint64_t value = random.bounded(last);
    EXPECT_LE(value, last);
    large |= value >> 32 != 0;
  }
  EXPECT_TRUE(large);
  EXPECT_EQ(random.bounded(0), 0u);
}

TEST(IndexedDataset, ReadsWhatTheWriterWroteInEveryType) {
  const Folder folder;
  for (int code = 1; code <= 8; ++code) {
    const auto type = static_cast<RowType>(code);
    IndexedDatasetWriter writer(folder / "rows", type);
    writer.add_row(std::vector<int64_t>{1, 2, 127});
    writer.add_row({});
    writer.end_document();
    writer.add_row(std::vector<int64_t>{5});
    writer.end_document();
    writer.finish();
    const IndexedDataset rows(folder / "rows");
    ASSERT_EQ(rows.num_rows(), 3);
    EXPECT_EQ(rows.type(), type);
    EXPECT_EQ(rows.row(0), (std::vector<int64_t>{1, 2, 127}));
    EXPECT_EQ(rows.length(1), 0);
    EXPECT_EQ(rows.row(2), (std::vector<int64_t>{5}));
    EXPECT_EQ(rows.documents(), (std::vector<int64_t>{0, 2, 3}));
    IndexedDatasetWriter twice(folder / "twice", type);
    twice.append(folder / "rows");
    twice.append(folder / "rows");
    twice.finish();
    EXPECT_EQ(IndexedDataset(folder / "twice").documents(), (std::vector<int64_t>{0, 2, 3, 5, 6}));
  }
}

TEST(IndexedDataset, FindsTheSmallestType) {
  EXPECT_EQ(smallest_row_type(0, 255), RowType::u8);
  EXPECT_EQ(smallest_row_type(0, 256), RowType::u16);
  EXPECT_EQ(smallest_row_type(-1, 127), RowType::i8);
  EXPECT_EQ(smallest_row_type(-1, 40000), RowType::i32);
  EXPECT_EQ(smallest_row_type(0, int64_t{1} << 40), RowType::u64);
}

TEST(IndexedDataset, NamesFilesThatItCannotRead) {
  const Folder folder;
  expect_error(error_of([&] { IndexedDataset(folder / "none"); }), "none.idx: cannot be opened");
  {
    IndexedDatasetWriter writer(folder / "rows", RowType::u8);
    expect_error(error_of([&] { writer.add_row(std::vector<int64_t>{256}); }), "does not hold 256");
    writer.add_row(std::vector<int64_t>{1, 2});
    writer.finish();
  }
  const IndexedDataset rows(folder / "rows");
  expect_error(error_of([&] { rows.row(1); }), "row 1, expected 0 to 0");
  fs::copy_file(folder / "rows.bin", folder / "bad.bin");
  std::ofstream(folder / "bad.idx") << "TNTIDX";
  expect_error(error_of([&] { IndexedDataset(folder / "bad"); }), "does not begin with MMIDIDX");
  fs::copy_file(folder / "rows.idx", folder / "bad.idx", fs::copy_options::overwrite_existing);
  fs::resize_file(folder / "bad.idx", fs::file_size(folder / "bad.idx") - 1);
  expect_error(error_of([&] { IndexedDataset(folder / "bad"); }), "bad.idx: is short");
  fs::copy_file(folder / "rows.idx", folder / "bad.idx", fs::copy_options::overwrite_existing);
  fs::resize_file(folder / "bad.bin", 1);
  expect_error(error_of([&] { IndexedDataset(folder / "bad").row(0); }), "bad.bin: is short");
}

std::string sampler_section(const std::string& sample_path, const std::string& metric_path, int lowest = 1) {
  return R"({"seed": 3, "data_sampling": {"num_epochs": 2, "curriculum_learning": {"curriculum_metrics": {"length": {
    "index_to_sample_path": ")" +
         sample_path + R"(", "index_to_metric_path": ")" + metric_path + R"(", "difficulty_type": "value",
    "clustering_type": "schedule_based", "schedule_type": "fixed_linear", "max_difficulty": 4, "min_difficulty": )" +
         std::to_string(lowest) + R"(, "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 1}}}}}})";
}

/// Sample s of 0 … 19 has difficulty 1 + s / 5.
void write_index(const Folder& folder) {
  IndexedDatasetWriter samples(folder / "samples", RowType::u8), metric(folder / "metric", RowType::u8);
  for (int64_t row = 0; row < 4; ++row) {
    std::vector<int64_t> members(5);
    std::iota(members.begin(), members.end(), row * 5);
    samples.add_row(members);
    metric.add_row(std::vector<int64_t>{row + 1});
  }
  samples.finish();
  metric.finish();
}

TEST(CurriculumSampler, ReachesSamplesAsTheirDifficultyComesAndResumesWithAnotherWorld) {
  const Folder folder;
  write_index(folder);
  const std::string section = sampler_section(folder / "samples", folder / "metric");
  const CurriculumSampler::Options alone = {.micro_batch = 2, .accumulation = 2};
  CurriculumSampler sampler(section, 20, alone);
  EXPECT_EQ(sampler.total_samples(), 40);
  std::set<int64_t> seen;
  std::vector<std::vector<int64_t>> rest;
  std::string state;
  for (int number = 0; auto batch = sampler.next(); ++number) {
    for (const int64_t sample : *batch) EXPECT_LE(1 + sample / 5, sampler.difficulties().at("length"));
    seen.insert(batch->begin(), batch->end());
    if (number == 5) state = sampler.state(sampler.position());
    if (number > 5) rest.push_back(*batch);
  }
  EXPECT_GT(*seen.rbegin(), 14);
  // Two ranks with half the accumulation draw the same batches, each rank its part.
  CurriculumSampler left(section, 20, {.micro_batch = 1, .accumulation = 2, .rank = 0, .world_size = 2});
  CurriculumSampler right(section, 20, {.micro_batch = 1, .accumulation = 2, .rank = 1, .world_size = 2});
  left.load_state(state);
  right.load_state(state);
  for (const auto& batch : rest) {
    EXPECT_EQ(left.next(), std::vector<int64_t>{batch[0]});
    EXPECT_EQ(right.next(), std::vector<int64_t>{batch[1]});
  }
  EXPECT_EQ(left.next(), std::nullopt);
}

TEST(CurriculumSampler, NamesWhatDoesNotFit) {
  const Folder folder;
  write_index(folder);
  const std::string section = sampler_section(folder / "samples", folder / "metric");
  const auto drawn = [](const std::string& text, int64_t samples, int64_t batch) {
    return error_of([&] { CurriculumSampler(text, samples, {.micro_batch = batch}).next(); });
  };
  expect_error(drawn(section, 3, 1), "names sample 3 of a data set of 3");
  expect_error(drawn(sampler_section(folder / "samples", folder / "metric", 0), 20, 1),
               "no sample has the first difficulty");
  expect_error(drawn(section, 20, 100), "too few samples for one batch of all ranks, 100");
  expect_error(drawn(section, 20, 0), "expected positive numbers");
  CurriculumSampler sampler(section, 20, {});
  expect_error(error_of([&] { sampler.load_state("[]"); }), "expected a JSON object");
  expect_error(error_of([&] { sampler.load_state("{}"); }), "cannot be read");
  CurriculumSampler other(section, 21, {});
  expect_error(error_of([&] { sampler.load_state(other.state(other.position())); }), "has num_samples 21");
  expect_error(error_of([&] { sampler.set_function("depth", nullptr); }), "no metric 'depth'");
}

TEST(LengthBatches, GrowUntilALimit) {
  const std::vector<int64_t> lengths = {3, 4, 9, 2, 2, 2, 1};
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  const LengthBatches found = batches_by_length(lengths, order, {.max_tokens = 7});
  // 9 exceeds the limit; the last sample is never taken.
  EXPECT_EQ(found.left_out, (std::vector<int64_t>{2}));
  EXPECT_EQ(found.micro_batches, (std::vector<std::vector<int64_t>>{{0, 1}, {3, 4, 5}}));
  EXPECT_EQ(found.batch_sizes, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(found.longest, (std::vector<int64_t>{4, 2}));
  expect_error(error_of([&] { batches_by_length(lengths, order, {.max_tokens = 0}); }), "max_tokens is 0");
  expect_error(error_of([&] { batches_by_length(lengths, order, {.max_tokens = 7, .micro_batches_per_batch = 9}); }),
               "give 2 micro-batches, expected at least 9");
}

TEST(LengthBatches, ScaleRates) {
  EXPECT_EQ(scaled_rate(0.1, 8, 16, RateScaling::linear), 0.2);
  EXPECT_EQ(scaled_rate(0.1, 4, 16, RateScaling::sqrt), 0.2);
  EXPECT_EQ(scaled_rate(0.1, 4, 16, RateScaling::none), 0.1);
  expect_error(error_of([] { scaled_rate(0.1, 0, 16, RateScaling::none); }), "expected positive numbers");
}

}  // namespace
}  // namespace deeptide
