// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Draws clusters and batches; a log of difficulties and batch sizes is all that a resume needs to draw them again.
#include "deeptide/curriculum_sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "base/libraries/nlohmann.h"
#include "config/section.h"
#include "data/curriculum_metric.h"
#include "data/numpy_random.h"

namespace deeptide {
namespace {

using data::CurriculumMetric;
using data::SampleList;
using nlohmann::ordered_json;

constexpr int kMostShortBatches = 100;  // in a row, once no difficulty grows any more

[[noreturn]] void refuse_draw(const std::string& what) { throw ConfigError("curriculum sampler: " + what); }

struct Cluster {
  SampleList samples;
  int64_t position = 0;  // of the next sample that is drawn
};

/// From `step` on, batches had this size and the metrics these difficulties.
struct LogEntry {
  int64_t step = 0;
  int64_t global_batch = 0;
  std::vector<int64_t> difficulties;
};

/// The state that drawing changes; all of it follows from the seed and the log.
struct Drawn {
  explicit Drawn(uint64_t seed) : random(seed) {}

  data::NumpyRandom random;
  std::vector<Cluster> clusters;
  std::vector<LogEntry> log;
  SampleList batch;
  CurriculumSampler::Position position;
};

int64_t checked_product(int64_t a, int64_t b, const char* what) {
  int64_t product = 0;
  if (a < 1 || b < 1 || __builtin_mul_overflow(a, b, &product)) {
    refuse_draw(std::string(what) + ": got " + std::to_string(a) + " * " + std::to_string(b) +
                ", expected positive numbers whose product 64 bits hold");
  }
  return product;
}

}  // namespace

struct __attribute__((visibility("hidden"))) CurriculumSampler::Impl {
  Impl(const JsonValue& section, int64_t num_samples, const Options& options)
      : num_samples_(num_samples), options_(options), drawn_(0) {
    const data::SectionReader outer(section, "data_efficiency");
    const data::SectionReader sampling = outer.below("data_sampling");
    seed_ = static_cast<uint64_t>(outer.has("seed") ? outer.integer("seed") : 1234);
    const int64_t epochs = sampling.has("num_epochs") ? sampling.integer("num_epochs") : 1000;
    total_ = checked_product(num_samples, epochs, "num_samples * num_epochs");
    if (num_samples > std::numeric_limits<uint32_t>::max()) {
      refuse_draw("the data set has " + std::to_string(num_samples) + " samples, expected less than 2^32");
    }
    joined_ = checked_product(options.micro_batch, options.world_size, "micro_batch * world_size");
    global_batch_ = checked_product(joined_, options.accumulation, "the global batch");
    if (options.rank < 0 || options.rank >= options.world_size) {
      refuse_draw("rank is " + std::to_string(options.rank) + ", expected 0 to " +
                  std::to_string(options.world_size - 1));
    }
    const data::SectionReader metrics = sampling.below("curriculum_learning").below("curriculum_metrics");
    for (const JsonMember& entry : metrics.value().members) {
      metrics_.emplace_back(entry.key, metrics.below(entry.key), num_samples);
    }
    if (metrics_.empty()) metrics.fail("*", "no metric; name at least one");
    drawn_ = Drawn(seed_);
  }

  std::optional<std::vector<int64_t>> next();
  ordered_json state(const Position& position) const;
  void load_state(const ordered_json& saved);

  std::vector<int64_t> scheduled(int64_t step);
  void draw(Drawn& drawn, int64_t global_batch, std::vector<int64_t> difficulties) const;
  void add_cluster(Drawn& drawn, const std::vector<int64_t>* before, const std::vector<int64_t>& now) const;
  SampleList reached(const Drawn& drawn, const std::vector<int64_t>* before, const std::vector<int64_t>& now) const;
  SampleList common(const Drawn& drawn, const std::vector<int64_t>& now) const;
  SampleList all_samples() const;
  std::vector<int64_t> share(const SampleList& slice) const;
  void check_progress(int short_batches);

 private:
  friend class CurriculumSampler;

  int64_t num_samples_;
  Options options_;
  uint64_t seed_ = 0;
  int64_t total_ = 0, joined_ = 0, global_batch_ = 0;
  std::vector<CurriculumMetric> metrics_;
  Drawn drawn_;
};

SampleList CurriculumSampler::Impl::all_samples() const {
  SampleList samples(static_cast<size_t>(num_samples_));
  std::iota(samples.begin(), samples.end(), uint32_t{0});
  return samples;
}

/// With several metrics that cluster: what all of them have reached and no cluster holds yet.
SampleList CurriculumSampler::Impl::common(const Drawn& drawn, const std::vector<int64_t>& now) const {
  SampleList samples;
  for (size_t i = 0; i < metrics_.size(); ++i) {
    SampleList reached = metrics_[i].clusters() ? metrics_[i].samples_between(std::nullopt, now[i]) : all_samples();
    if (i == 0) {
      samples = std::move(reached);
      continue;
    }
    std::sort(samples.begin(), samples.end());
    std::sort(reached.begin(), reached.end());
    SampleList both;
    std::set_intersection(samples.begin(), samples.end(), reached.begin(), reached.end(), std::back_inserter(both));
    samples = std::move(both);
  }
  std::vector<bool> held(static_cast<size_t>(num_samples_), false);
  for (const Cluster& cluster : drawn.clusters) {
    for (const uint32_t sample : cluster.samples) held[sample] = true;
  }
  std::erase_if(samples, [&](uint32_t sample) { return held[sample]; });
  return samples;
}

SampleList CurriculumSampler::Impl::reached(const Drawn& drawn, const std::vector<int64_t>* before,
                                            const std::vector<int64_t>& now) const {
  const auto clustering = std::count_if(metrics_.begin(), metrics_.end(), [](const auto& m) { return m.clusters(); });
  if (clustering > 1) return common(drawn, now);
  for (size_t i = 0; i < metrics_.size(); ++i) {
    if (!metrics_[i].clusters()) continue;
    return metrics_[i].samples_between(before ? std::optional((*before)[i]) : std::nullopt, now[i]);
  }
  return drawn.clusters.empty() ? all_samples() : SampleList();
}

void CurriculumSampler::Impl::add_cluster(Drawn& drawn, const std::vector<int64_t>* before,
                                          const std::vector<int64_t>& now) const {
  SampleList samples = reached(drawn, before, now);
  if (samples.empty()) return;
  drawn.random.shuffle(samples);
  drawn.clusters.push_back({std::move(samples), 0});
}

void CurriculumSampler::Impl::draw(Drawn& drawn, int64_t global_batch, std::vector<int64_t> difficulties) const {
  const int64_t step = ++drawn.position.step;
  const bool first = drawn.log.empty();
  const bool grew = first || drawn.log.back().difficulties != difficulties;
  if (grew) add_cluster(drawn, first ? nullptr : &drawn.log.back().difficulties, difficulties);
  if (grew || drawn.log.back().global_batch != global_batch) {
    drawn.log.push_back({step, global_batch, std::move(difficulties)});
  }
  if (drawn.clusters.empty()) refuse_draw("no sample has the first difficulty; raise min_difficulty of its metrics");
  std::vector<int64_t> sizes;
  for (const Cluster& cluster : drawn.clusters) sizes.push_back(static_cast<int64_t>(cluster.samples.size()));
  const std::vector<int64_t> counts = drawn.random.choose(sizes, global_batch);
  drawn.batch.clear();
  for (size_t i = 0; i < counts.size(); ++i) {
    Cluster& cluster = drawn.clusters[i];
    const int64_t begin = std::min(cluster.position, sizes[i]);
    const int64_t end = std::min(begin + counts[i], sizes[i]);
    drawn.batch.insert(drawn.batch.end(), cluster.samples.begin() + begin, cluster.samples.begin() + end);
    cluster.position += counts[i];
    if (const int64_t rest = counts[i] - (end - begin); rest > 0) {
      drawn.random.shuffle(cluster.samples);
      drawn.batch.insert(drawn.batch.end(), cluster.samples.begin(),
                         cluster.samples.begin() + std::min(rest, sizes[i]));
      cluster.position = rest;
    }
  }
  drawn.random.shuffle(drawn.batch);
  drawn.position.offset = 0;
}

std::vector<int64_t> CurriculumSampler::Impl::scheduled(int64_t step) {
  std::vector<int64_t> difficulties;
  for (CurriculumMetric& metric : metrics_) difficulties.push_back(metric.schedule().update(step));
  return difficulties;
}

/// Rank r takes the samples from round(r * n / world), halves to even, as Python rounds.
std::vector<int64_t> CurriculumSampler::Impl::share(const SampleList& slice) const {
  const auto place = [&](int rank) {
    const double at = static_cast<double>(rank) * static_cast<double>(slice.size());
    return static_cast<std::ptrdiff_t>(std::nearbyint(at / options_.world_size));
  };
  return {slice.begin() + place(options_.rank), slice.begin() + place(options_.rank + 1)};
}

void CurriculumSampler::Impl::check_progress(int short_batches) {
  const bool grows = std::any_of(metrics_.begin(), metrics_.end(), [](CurriculumMetric& metric) {
    return metric.schedule().current() < metric.schedule().max_difficulty();
  });
  if (grows || short_batches < kMostShortBatches) return;
  refuse_draw("the last difficulty reaches too few samples for one batch of all ranks, " + std::to_string(joined_) +
              "; give a smaller batch, drop_last false, or metrics that reach more samples");
}

std::optional<std::vector<int64_t>> CurriculumSampler::Impl::next() {
  Position& at = drawn_.position;
  for (int short_batches = 0; at.consumed <= total_; ++short_batches) {
    if (at.offset >= static_cast<int64_t>(drawn_.batch.size())) {
      check_progress(short_batches);
      draw(drawn_, global_batch_, scheduled(at.step + 1));
    }
    const int64_t end = std::min(at.offset + joined_, static_cast<int64_t>(drawn_.batch.size()));
    const SampleList slice(drawn_.batch.begin() + at.offset, drawn_.batch.begin() + end);
    at.offset = end;
    const auto size = static_cast<int64_t>(slice.size());
    // Without drop_last a short slice counts, as long as every rank gets a sample of it.
    if (size < joined_ && (options_.drop_last || size < options_.world_size)) continue;
    at.consumed += size;
    return share(slice);
  }
  return std::nullopt;
}

ordered_json CurriculumSampler::Impl::state(const Position& position) const {
  ordered_json log = ordered_json::array();
  for (const LogEntry& entry : drawn_.log) {
    if (entry.step <= position.step) log.push_back({entry.step, entry.global_batch, entry.difficulties});
  }
  ordered_json names = ordered_json::array();
  for (const CurriculumMetric& metric : metrics_) names.push_back(metric.name());
  return {{"seed", seed_},         {"num_samples", num_samples_}, {"metrics", names},
          {"step", position.step}, {"offset", position.offset},   {"consumed", position.consumed},
          {"log", std::move(log)}};
}

void CurriculumSampler::Impl::load_state(const ordered_json& saved) {
  const ordered_json mine = state(drawn_.position);
  for (const char* key : {"seed", "num_samples", "metrics"}) {
    if (saved.at(key) == mine[key]) continue;
    refuse_draw(std::string("the saved state has ") + key + " " + write_json(saved[key]) + ", this sampler " +
                write_json(mine[key]) + "; give the data set and configuration of the saved run");
  }
  std::vector<LogEntry> log;
  for (const ordered_json& entry : saved.at("log")) {
    log.push_back({entry.at(0).get<int64_t>(), entry.at(1).get<int64_t>(), entry.at(2).get<std::vector<int64_t>>()});
    if (log.back().difficulties.size() != metrics_.size())
      refuse_draw("the saved state's log does not fit its metrics");
  }
  const auto steps = saved.at("step").get<int64_t>();
  if (steps > 0 && (log.empty() || log.front().step != 1))
    refuse_draw("the saved state's log does not begin at step 1");
  Drawn drawn(seed_);
  size_t entry = 0;
  for (int64_t step = 1; step <= steps; ++step) {
    while (entry + 1 < log.size() && log[entry + 1].step <= step) ++entry;
    draw(drawn, log[entry].global_batch, log[entry].difficulties);
  }
  drawn.position.offset = saved.at("offset").get<int64_t>();
  drawn.position.consumed = saved.at("consumed").get<int64_t>();
  if (drawn.position.offset < 0) refuse_draw("the saved state has a negative offset");
  for (size_t i = 0; i < metrics_.size(); ++i) {
    CurriculumSchedule& schedule = metrics_[i].schedule();
    schedule.set_current(drawn.log.empty() ? schedule.min_difficulty() : drawn.log.back().difficulties[i]);
  }
  drawn_ = std::move(drawn);
}

CurriculumSampler::CurriculumSampler(const Config& config, int64_t num_samples, const Options& options)
    : impl_(std::make_unique<Impl>(config::section_with_defaults(config, "data_efficiency"), num_samples, options)) {}
CurriculumSampler::CurriculumSampler(std::string_view section, int64_t num_samples, const Options& options)
    : impl_(std::make_unique<Impl>(parse_json(section, "data_efficiency"), num_samples, options)) {}
CurriculumSampler::~CurriculumSampler() = default;
CurriculumSampler::CurriculumSampler(CurriculumSampler&&) noexcept = default;

std::optional<std::vector<int64_t>> CurriculumSampler::next() { return impl_->next(); }
int64_t CurriculumSampler::total_samples() const { return impl_->total_; }
CurriculumSampler::Position CurriculumSampler::position() const { return impl_->drawn_.position; }
std::string CurriculumSampler::state(const Position& position) const { return write_json(impl_->state(position)); }

void CurriculumSampler::load_state(const std::string& state) {
  const ordered_json saved = try_read_json<ordered_json>(state);
  if (!saved.is_object()) refuse_draw("the saved state is '" + state.substr(0, 40) + "', expected a JSON object");
  try {
    impl_->load_state(saved);
  } catch (const ordered_json::exception& error) {
    refuse_draw(std::string("the saved state cannot be read: ") + error.what());
  }
}

void CurriculumSampler::set_function(const std::string& metric, CurriculumSchedule::Function function) {
  for (CurriculumMetric& one : impl_->metrics_) {
    if (one.name() == metric) return one.schedule().set_function(std::move(function));
  }
  refuse_draw("there is no metric '" + metric + "' in curriculum_metrics");
}

std::map<std::string, int64_t> CurriculumSampler::difficulties() const {
  std::map<std::string, int64_t> now;
  if (impl_->drawn_.log.empty()) return now;
  for (size_t i = 0; i < impl_->metrics_.size(); ++i) {
    now[impl_->metrics_[i].name()] = impl_->drawn_.log.back().difficulties[i];
  }
  return now;
}

}  // namespace deeptide
