// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One metric of a curriculum: its schedule, and which samples a difficulty reaches.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/section_reader.h"
#include "deeptide/curriculum.h"
#include "deeptide/indexed_dataset.h"

namespace deeptide::data {

using SampleList = std::vector<uint32_t>;

class CurriculumMetric {
 public:
  /// Errors: ConfigError naming the key or the file.
  CurriculumMetric(std::string name, const SectionReader& section, int64_t num_samples);

  const std::string& name() const { return name_; }
  CurriculumSchedule& schedule() { return schedule_; }
  /// Whether samples join by difficulty; otherwise all are there from the start.
  bool clusters() const { return by_sample_.has_value(); }
  /// The samples above difficulty `after`, nothing: from the easiest, up to `until`, row by row.
  SampleList samples_between(std::optional<int64_t> after, int64_t until) const;

 private:
  SampleList by_value(std::optional<int64_t> after, int64_t until) const;
  SampleList by_percentile(int64_t after, int64_t until) const;
  void append(SampleList& samples, int64_t row, int64_t begin, int64_t end) const;

  std::string name_;
  int64_t num_samples_;
  bool percentile_;
  CurriculumSchedule schedule_;
  std::optional<IndexedDataset> by_sample_;  // samples of each row, the easiest first
  std::vector<int64_t> values_;              // of each row; empty for percentiles
};

}  // namespace deeptide::data
