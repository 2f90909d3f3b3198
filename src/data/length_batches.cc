// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Grows micro-batches sample by sample; sums only grow, so the first that exceeds a limit ends the search.
#include "deeptide/length_batches.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace deeptide {
namespace {

[[noreturn]] void refuse_batches(const std::string& what) { throw ConfigError("batches by length: " + what); }

void check(const LengthBatchOptions& options) {
  const auto positive = [](const char* name, int64_t value) {
    if (value < 1) refuse_batches(std::string(name) + " is " + std::to_string(value) + ", expected at least 1");
  };
  positive("max_tokens", options.max_tokens);
  positive("min_batch_size", options.min_batch_size);
  positive("max_batch_size", options.max_batch_size.value_or(1));
  positive("the number of micro-batches of a batch", options.micro_batches_per_batch);
}

/// The end of the largest group of `width` micro-batches that begins at `begin`; `begin` if there is none.
size_t end_of_group(const std::vector<int64_t>& lengths, size_t begin, size_t width,
                    const LengthBatchOptions& options) {
  std::vector<int64_t> sums(width, 0);
  size_t last = begin;
  int64_t count = 0;
  for (size_t end = begin + width; end < lengths.size(); end += width) {
    ++count;
    for (size_t i = 0; i < width; ++i) sums[i] += lengths[end - width + i];
    if (count > options.max_batch_size.value_or(count)) break;
    if (*std::max_element(sums.begin(), sums.end()) > options.max_tokens) break;
    if (count >= options.min_batch_size) last = end;
  }
  return last;
}

}  // namespace

LengthBatches batches_by_length(std::span<const int64_t> lengths, std::span<const int64_t> order,
                                const LengthBatchOptions& options) {
  check(options);
  LengthBatches result;
  std::vector<int64_t> samples, sizes;
  for (const int64_t sample : order) {
    if (sample < 0 || sample >= static_cast<int64_t>(lengths.size())) {
      refuse_batches("sample " + std::to_string(sample) + " of " + std::to_string(lengths.size()) + " lengths");
    }
    const int64_t length = lengths[static_cast<size_t>(sample)];
    if (length < 0) refuse_batches("sample " + std::to_string(sample) + " has length " + std::to_string(length));
    if (length > options.max_tokens) {
      result.left_out.push_back(sample);
      continue;
    }
    samples.push_back(sample);
    sizes.push_back(length);
  }
  const auto per_batch = static_cast<size_t>(options.micro_batches_per_batch);
  const size_t width = options.same_size ? per_batch : 1;
  std::vector<int64_t> longest;
  for (size_t begin = 0; begin < samples.size();) {
    const size_t end = end_of_group(sizes, begin, width, options);
    if (end == begin) break;
    for (size_t i = 0; i < width; ++i) {  // interleaved, which balances a sorted order
      auto& micro_batch = result.micro_batches.emplace_back();
      longest.push_back(0);
      for (size_t at = begin + i; at < end; at += width) {
        micro_batch.push_back(samples[at]);
        longest.back() = std::max(longest.back(), sizes[at]);
      }
    }
    begin = end;
  }
  if (result.micro_batches.size() < per_batch) {
    refuse_batches("the samples give " + std::to_string(result.micro_batches.size()) +
                   " micro-batches, expected at least " + std::to_string(per_batch) +
                   " for one batch; add data, or lower the limits or the batch size");
  }
  result.micro_batches.resize(result.micro_batches.size() / per_batch * per_batch);
  for (size_t first = 0; first < result.micro_batches.size(); first += per_batch) {
    int64_t count = 0;
    for (size_t i = 0; i < per_batch; ++i) count += static_cast<int64_t>(result.micro_batches[first + i].size());
    result.batch_sizes.push_back(count);
    const auto begin = longest.begin() + static_cast<std::ptrdiff_t>(first);
    result.longest.push_back(*std::max_element(begin, begin + static_cast<std::ptrdiff_t>(per_batch)));
  }
  return result;
}

double scaled_rate(double rate, int64_t base, int64_t batch, RateScaling scaling) {
  if (base < 1 || batch < 0) {
    refuse_batches("a rate for " + std::to_string(batch) + " samples from one for " + std::to_string(base) +
                   ", expected positive numbers");
  }
  switch (scaling) {
    case RateScaling::linear:
      return rate * static_cast<double>(batch) / static_cast<double>(base);
    case RateScaling::sqrt:
      return rate * std::sqrt(static_cast<double>(batch) / static_cast<double>(base));
    case RateScaling::none:
      break;
  }
  return rate;
}

}  // namespace deeptide
