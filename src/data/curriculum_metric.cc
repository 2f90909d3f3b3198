// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads the index files that the DataAnalyzer wrote.
#include "data/curriculum_metric.h"

#include <algorithm>

namespace deeptide::data {

CurriculumMetric::CurriculumMetric(std::string name, const SectionReader& section, int64_t num_samples)
    : name_(std::move(name)),
      num_samples_(num_samples),
      percentile_(section.word("difficulty_type") == "percentile"),
      schedule_(CurriculumSchedule::from_text(to_text(section.value()), "curriculum_metrics." + name_)) {
  if (section.word("clustering_type") == "single_cluster") return;
  by_sample_.emplace(section.word("index_to_sample_path"));
  if (percentile_) return;
  const IndexedDataset by_metric(section.word("index_to_metric_path"));
  if (by_metric.num_rows() != by_sample_->num_rows()) {
    section.fail("index_to_metric_path", "has " + std::to_string(by_metric.num_rows()) +
                                             " rows, index_to_sample_path has " +
                                             std::to_string(by_sample_->num_rows()) + "; give files of one analysis");
  }
  for (int64_t row = 0; row < by_metric.num_rows(); ++row) {
    const std::vector<int64_t> value = by_metric.row(row);
    if (value.size() != 1) section.fail("index_to_metric_path", "row " + std::to_string(row) + " is no single value");
    values_.push_back(value.front());
  }
}

void CurriculumMetric::append(SampleList& samples, int64_t row, int64_t begin, int64_t end) const {
  const std::vector<int64_t> numbers = by_sample_->row(row);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t sample = numbers[static_cast<size_t>(i)];
    if (sample < 0 || sample >= num_samples_) {
      throw ConfigError("curriculum_metrics." + name_ + ".index_to_sample_path: names sample " +
                        std::to_string(sample) + " of a data set of " + std::to_string(num_samples_) +
                        "; analyze this data set again");
    }
    samples.push_back(static_cast<uint32_t>(sample));
  }
}

SampleList CurriculumMetric::by_value(std::optional<int64_t> after, int64_t until) const {
  SampleList samples;
  for (int64_t row = 0; row < by_sample_->num_rows(); ++row) {
    const int64_t value = values_[static_cast<size_t>(row)];
    if (value <= until && (!after || value > *after)) append(samples, row, 0, by_sample_->length(row));
  }
  return samples;
}

SampleList CurriculumMetric::by_percentile(int64_t after, int64_t until) const {
  int64_t total = 0;
  for (int64_t row = 0; row < by_sample_->num_rows(); ++row) total += by_sample_->length(row);
  const int64_t percentiles = std::max<int64_t>(schedule_.max_difficulty(), 1);
  const int64_t begin = total / percentiles * after;
  const int64_t end = until == percentiles ? total : total / percentiles * until;
  SampleList samples;
  int64_t passed = 0;
  for (int64_t row = 0; row < by_sample_->num_rows() && passed < end; ++row) {
    const int64_t length = by_sample_->length(row);
    const int64_t first = std::max<int64_t>(begin - passed, 0);
    if (first < length) append(samples, row, first, std::min(length, end - passed));
    passed += length;
  }
  return samples;
}

SampleList CurriculumMetric::samples_between(std::optional<int64_t> after, int64_t until) const {
  return percentile_ ? by_percentile(after.value_or(0), until) : by_value(after, until);
}

}  // namespace deeptide::data
