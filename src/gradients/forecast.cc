// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Counts accumulators, rows and buckets.
#include "gradients/forecast.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <numeric>
#include <set>
#include <utility>

#include "device/memory/memory.h"

namespace deeptide::gradients {

namespace {

constexpr size_t kUnderWay = RouteForecast().pace;
/// So many buckets are kept at least, where there are as many units: one fills, two are under way.
constexpr size_t kFewestBuckets = kUnderWay + 1;
/// The bytes of small buckets that may be under way: then ranks that share memory may drift further apart.
constexpr int64_t kBytesOfSmallBuckets = 16 << 20;

/// Plays a backward pass that reaches parameters in the reverse order of the model's: `open` is called when the first
/// gradient of a unit arrives, `send` when all of it and of the units after it have. `skips`: by unit; empty: none.
template <typename Open, typename Send>
void play_backward(const std::vector<const sharding::UnitLayout*>& units, const std::vector<bool>& skips,
                   const Open& open, const Send& send) {
  std::vector<std::pair<int, size_t>> arrivals;  // parameter, unit
  std::vector<size_t> missing(units.size(), 0);
  for (size_t i = 0; i < units.size(); ++i) {
    if (!skips.empty() && skips[i]) continue;
    for (const sharding::Slot& slot : units[i]->slots) arrivals.emplace_back(slot.parameter, i);
    missing[i] = units[i]->slots.size();
  }
  std::sort(arrivals.begin(), arrivals.end(), std::greater<>());
  size_t next = units.size();
  for (const auto& [parameter, unit] : arrivals) {
    if (missing[unit]-- == units[unit]->slots.size()) open(unit);
    for (; next > 0 && missing[next - 1] == 0; --next) {
      if (skips.empty() || !skips[next - 1]) send(next - 1);
    }
  }
}

/// Returns sizes of buckets, the largest first, which serve each moment of a backward pass: those that fill, those that
/// wait for a unit after them, and as many as may be `under_way`.
std::vector<int64_t> needed(const std::vector<const sharding::UnitLayout*>& units, const std::vector<bool>& skips,
                            const std::vector<int64_t>& sizes, size_t under_way) {
  std::vector<int64_t> most;
  std::deque<int64_t> sent;
  std::set<size_t> filling;
  const auto open = [&](size_t unit) {
    filling.insert(unit);
    std::vector<int64_t> now(sent.begin(), sent.end());
    for (const size_t each : filling) now.push_back(sizes[each]);
    std::sort(now.begin(), now.end(), std::greater<>());
    most.resize(std::max(most.size(), now.size()));
    for (size_t i = 0; i < now.size(); ++i) most[i] = std::max(most[i], now[i]);
  };
  const auto send = [&](size_t unit) {
    filling.erase(unit);
    sent.push_back(sizes[unit]);
    if (sent.size() > under_way) sent.pop_front();
  };
  play_backward(units, skips, open, send);
  return most;
}

/// Any so many of the units fit buffers of the sizes of the largest: the largest of them into the first, and so on.
std::vector<int64_t> largest(std::vector<int64_t> sizes, size_t count) {
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  sizes.resize(std::min(sizes.size(), count));
  return sizes;
}

int64_t total(const std::vector<int64_t>& sizes) { return std::accumulate(sizes.begin(), sizes.end(), int64_t{0}); }

/// Serves what either serves. Both: the largest first.
std::vector<int64_t> both(std::vector<int64_t> sizes, const std::vector<int64_t>& others) {
  sizes.resize(std::max(sizes.size(), others.size()));
  for (size_t i = 0; i < others.size(); ++i) sizes[i] = std::max(sizes[i], others[i]);
  return sizes;
}

/// Buckets that are mostly zero fill until the close, beside the others. Then two messages have what is not.
void add_mostly_zero(std::vector<int64_t>& buckets, const std::vector<int64_t>& sizes,
                     const std::vector<bool>& mostly_zero) {
  std::vector<int64_t> until_close;
  for (size_t i = 0; i < mostly_zero.size(); ++i) {
    if (mostly_zero[i]) until_close.push_back(sizes[i]);
  }
  if (until_close.empty()) return;
  const int64_t message = *std::max_element(until_close.begin(), until_close.end());
  buckets = both(std::move(buckets), {message, message});
  buckets.insert(buckets.end(), until_close.begin(), until_close.end());
}

/// In shared memory a bucket may be sent, and another may wait for its last reader, beside those that have just filled.
std::vector<int64_t> buckets_of_shared_memory(const std::vector<int64_t>& sizes, const RouteForecast& way) {
  std::vector<int64_t> buckets = largest(sizes, way.pace + 2);
  while (buckets.size() > kFewestBuckets && total(buckets) > kBytesOfSmallBuckets) buckets.pop_back();
  return buckets;
}

/// Forecasts a Reducer where nothing is reserved: on a device, whose order of calls says which buffers are in use.
class QueueForecast {
 public:
  QueueForecast(const ReducerOptions& options, const RouteForecast& way)
      : options_(options), way_(way), stay_(buckets_stay(options, way)) {}

  /// Returns the most bytes of a backward pass. The second finds the first one's buffers.
  int64_t peak(const std::vector<const sharding::UnitLayout*>& units) {
    const bool sums = options_.accumulates_whole;
    const int64_t item = size_of(sums ? options_.accumulate_dtype : options_.reduce_dtype);
    const auto ignore = [](size_t) {};
    for (int pass = 0; pass < 2; ++pass) {
      std::vector<int64_t> filled(units.size(), 0);
      const auto open = [&](size_t unit) { filled[unit] = buckets_.take(units[unit]->numel * item); };
      const auto send = [&](size_t unit) { launch(*units[unit], filled[unit]); };
      if (sums) play_backward(units, {}, open, ignore);  // all but the last micro-batch stay
      play_backward(units, {}, sums ? std::function<void(size_t)>(ignore) : open, send);
      while (!queue_.empty()) retire_front();
      for (const int64_t bucket : std::exchange(kept_, {})) buckets_.put(bucket);  // after the step
    }
    return buckets_.peak() + arrivals_.peak();
  }

 private:
  struct UnderWay {
    int64_t bucket = 0, arriving = 0;
  };

  static int64_t size_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

  void launch(const sharding::UnitLayout& unit, int64_t bucket) {
    UnderWay next{.bucket = bucket};
    if (options_.accumulates_whole && options_.reduce_dtype != options_.accumulate_dtype) {
      next.bucket = buckets_.take(unit.numel * size_of(options_.reduce_dtype));
      buckets_.put(bucket);
    }
    if (queue_.size() >= way_.pace) retire_front();
    if (way_.arriving > 0) next.arriving = arrivals_.take(way_.arriving_bytes(unit));
    queue_.push_back(next);
  }
  void retire_front() {
    if (stay_) {
      kept_.push_back(queue_.front().bucket);
    } else {
      buckets_.put(queue_.front().bucket);
    }
    if (way_.arriving > 0) arrivals_.put(queue_.front().arriving);
    queue_.pop_front();
  }

  const ReducerOptions& options_;
  const RouteForecast& way_;
  const bool stay_;
  std::vector<int64_t> kept_;  // until the step
  device::PoolForecast buckets_{kMaxBucketWaste}, arrivals_{kMaxBucketWaste};
  std::deque<UnderWay> queue_;
};

}  // namespace

ReducerBuffers reserved_buffers(const std::vector<const sharding::UnitLayout*>& units, const ReducerOptions& options,
                                int num_ranks, bool shares_memory) {
  const RouteForecast way = forecast(options.route(num_ranks, shares_memory));
  const auto item = static_cast<int64_t>(c10::elementSize(options.reduce_dtype));
  const auto sum = static_cast<int64_t>(c10::elementSize(options.accumulate_dtype));
  std::vector<int64_t> sizes, sums, arriving;
  for (size_t i = 0; i < units.size(); ++i) {
    sizes.push_back(units[i]->numel * item);
    sums.push_back(units[i]->numel * sum);
    // At the close all rows travel.
    arriving.push_back(options.is_mostly_zero(i) ? sizes.back() : way.arriving_bytes(*units[i]));
  }
  ReducerBuffers buffers;
  if (!options.reserve) return buffers;
  if (options.accumulates_whole) {
    buffers.buckets = sums;
    const bool narrows = item < sum && !sizes.empty();
    if (narrows) buffers.buckets.push_back(*std::max_element(sizes.begin(), sizes.end()));
  } else if (buckets_stay(options, way)) {
    buffers.buckets = sizes;
  } else if (shares_memory) {
    buffers.buckets = both(buckets_of_shared_memory(sizes, way), needed(units, {}, sizes, kUnderWay));
  } else {
    // Alone: one fills while one is summed.
    const size_t under_way = (num_ranks > 1 ? way.pace : 1) + way.lent;
    buffers.buckets = both(largest(sizes, under_way + 1), needed(units, options.mostly_zero, sizes, under_way));
    add_mostly_zero(buffers.buckets, sizes, options.mostly_zero);
  }
  if (way.arriving > 0) buffers.received = options.keep_rows ? arriving : largest(arriving, way.pace);
  return buffers;
}

size_t most_ahead(size_t num_units, const RouteForecast& way) {
  return std::clamp(kMaxRoundsAhead * num_units, way.pace, static_cast<size_t>(host::Exchange::kMaxOffers / 4));
}

std::vector<CpuSums::Cut> cuts_of(const std::vector<const sharding::UnitLayout*>& units,
                                  const ReducerOptions& options) {
  std::vector<CpuSums::Cut> cuts;
  if (options.offload) return cuts;
  for (size_t i = 0; i < options.stays.size(); ++i) cuts.push_back({units[i]->shard, options.stays[i]});
  const bool leave = std::any_of(cuts.begin(), cuts.end(), [](const auto& cut) { return cut.stays < cut.numel; });
  return leave ? cuts : std::vector<CpuSums::Cut>();
}

ReducerForecast forecast(const std::vector<const sharding::UnitLayout*>& units, const ReducerOptions& options,
                         int num_ranks, bool shares_memory) {
  const auto item = static_cast<int64_t>(c10::elementSize(options.reduce_dtype));
  const auto sum = static_cast<int64_t>(c10::elementSize(options.accumulate_dtype));
  int64_t sums = 0, in_files = 0, round = 0, largest_unit = 0;
  const auto cuts = cuts_of(units, options);
  for (size_t i = 0; i < units.size(); ++i) {
    const int64_t shard = units[i]->shard, stays = options.stays_of(i, shard);
    if (options.offload || stays == shard) {
      sums += stays * sum;
      in_files += (shard - stays) * sum;
    }
    round += units[i]->numel * item;
    largest_unit = std::max(largest_unit, units[i]->numel * item);
  }
  // Rows that stay until the step count as gradients, wherever they lie.
  const RouteForecast way = forecast(options.route(num_ranks, shares_memory));
  const bool stay = buckets_stay(options, way);
  const ReducerBuffers buffers = reserved_buffers(units, options, num_ranks, shares_memory);
  ReducerForecast bytes;
  bytes.gradients = stay ? total(buffers.buckets) : options.keep_rows ? total(buffers.received) : sums;
  bytes.communication = (stay ? 0 : total(buffers.buckets)) + (options.keep_rows ? 0 : total(buffers.received));
  if (!options.reserve) (stay ? bytes.gradients : bytes.communication) = QueueForecast(options, way).peak(units);
  bytes.gradients_in_files = in_files;
  for (size_t i = 0; options.route(num_ranks, shares_memory).keeps_errors() && i < units.size(); ++i) {
    if (!options.is_mostly_zero(i)) bytes.communication += units[i]->numel * static_cast<int64_t>(sizeof(float));
  }
  const auto leaving = CpuSums::forecast(cuts, options.accumulate_dtype);
  bytes.gradients += leaving.on_device;
  bytes.gradients_on_host = leaving.on_host;
  if (options.offload) bytes.gradients += options.offload->num_slots * tiers::kSwapBlockBytes;
  if (num_ranks == 1) {  // gradients of several backward passes, or in another order than the model's
    (stay ? bytes.late_gradients : bytes.late_communication) = 2 * round;
    return bytes;
  }
  // On one side: what is sent, or received, or still unread by other ranks.
  const int64_t late = std::min(static_cast<int64_t>(kMaxRoundsAhead) * round,
                                static_cast<int64_t>(most_ahead(units.size(), way)) * largest_unit);
  bytes.late_gradients = stay ? 2 * late : options.keep_rows ? late : 0;
  bytes.late_communication = stay ? 0 : options.keep_rows ? late : 2 * late;
  return bytes;
}

}  // namespace deeptide::gradients
