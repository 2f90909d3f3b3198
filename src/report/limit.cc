// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Compares the shares of a step.
#include "report/limit.h"

#include <algorithm>

#include "base/libraries/format.h"
#include "base/text.h"

namespace deeptide::report {

namespace {

constexpr double kLate = 0.10;
constexpr double kOther = 0.20;
constexpr double kMemoryBound = 0.5;

/// The middle of one part of each rank's time, over all but `except`.
double median_but(const std::vector<StepTimes>& times, size_t except, float StepTimes::*part) {
  std::vector<float> values;
  for (size_t i = 0; i < times.size(); ++i) {
    if (i != except) values.push_back(times[i].*part);
  }
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double busy(const StepTimes& times) { return times.total - times.waiting; }

struct Shares {
  size_t busiest = 0;
  double total = 0, late = 0, waiting = 0, files = 0, data = 0, computing = 0;  // seconds, of the busiest rank
};

Shares shares_of(const LimitFacts& facts) {
  const std::vector<StepTimes>& times = facts.times;
  Shares shares;
  std::vector<StepTimes> by_busy = times;
  for (size_t i = 0; i < times.size(); ++i) {
    if (busy(times[i]) > busy(times[shares.busiest])) shares.busiest = i;
    by_busy[i].total = static_cast<float>(busy(times[i]));
  }
  const StepTimes& most = times[shares.busiest];
  shares.total = most.total;
  const bool has_others = times.size() > 1;
  if (has_others) shares.late = busy(most) - median_but(by_busy, shares.busiest, &StepTimes::total);
  if (has_others || facts.has_stages) shares.waiting = most.waiting;  // nobody of the team is late for the busiest rank
  shares.files = most.files;
  shares.data = most.between;
  shares.computing = most.computing();
  return shares;
}

std::string share_text(double part, double total) { return format_text("{:.0f} %", 100.0 * part / total); }

/// Why a rank is late: what it does for longer than the others.
std::string why_late(const LimitFacts& facts, size_t late) {
  struct Part {
    const char* verb;
    float StepTimes::*time;
    const char* cure;
  };
  static constexpr Part kParts[] = {
      {"spends {:.3g} s between steps", &StepTimes::between, "look at its data loader (workers, storage)"},
      {"waits {:.3g} s for files", &StepTimes::files, "look at its drive ('deeptide bench io' there)"},
      {"computes for {:.3g} s", &StepTimes::total,
       "look for other processes, a hot or throttled device, or give it "
       "less data ('deeptide doctor' there)"}};
  std::vector<StepTimes> times = facts.times;
  for (StepTimes& rank : times) rank.total = rank.computing();
  const Part* worst = nullptr;
  double most = 0.0, others = 0.0;
  for (const Part& part : kParts) {
    const double middle = median_but(times, late, part.time);
    if (worst != nullptr && times[late].*part.time - middle <= most) continue;
    worst = &part;
    most = times[late].*part.time - middle;
    others = middle;
  }
  return format_text("{} (others {:.3g} s): {}",
                     format_erased(worst->verb, fmt::make_format_args(times[late].*worst->time)), others, worst->cure);
}

LimitFound compute_limit(const LimitFacts& facts, const Shares& shares) {
  LimitFound found{.share = shares.computing / shares.total};
  const StepTimes& most = facts.times[shares.busiest];
  const double by_memory =
      most.optimizer + std::max(facts.memory_bound, 0.0) * (shares.computing - static_cast<double>(most.optimizer));
  const bool is_memory = facts.memory_bound >= 0.0 && by_memory > kMemoryBound * shares.computing;
  found.limit = is_memory ? Limit::memory : Limit::compute;
  if (is_memory) {
    found.text = format_text("{} of computing is in operators, and in the optimizer, that move more than they compute",
                             share_text(by_memory, shares.computing));
    if (facts.triad > 0.0) {
      found.text += format_text(" ({}/s of this machine's {}/s)", bytes_text(static_cast<int64_t>(facts.bytes_per_s)),
                                bytes_text(static_cast<int64_t>(facts.triad)));
    }
    found.text +=
        ": larger micro-batches, bf16, fused operators (engine.compile(), deeptide.ops), or more accumulation";
    return found;
  }
  found.text = facts.flops_share >= 0.0
                   ? format_text("computing at {:.0f} % of this machine's measured peak", 100.0 * facts.flops_share)
                   : std::string("computing");
  found.text += ": bf16, less recomputation, or more ranks";
  return found;
}

LimitFound other_limit(const LimitFacts& facts, const Shares& shares) {
  const double most = std::max({shares.waiting, shares.files, shares.data});
  if (most < kOther * shares.total) return compute_limit(facts, shares);
  LimitFound found{.share = most / shares.total};
  if (most == shares.waiting && facts.has_stages) {
    found.limit = Limit::stages;
    found.text = format_text(
        "{:.3g} s of a step wait for other stages: engine.train_batch(), which overlaps them, with more "
        "gradient_accumulation_steps, or fewer stages",
        shares.waiting);
  } else if (most == shares.waiting) {
    found.limit = Limit::network;
    found.text = format_text("{:.3g} s of a step wait for transfers between ranks", shares.waiting);
    if (!facts.slow_link.empty()) found.text += "; slow " + facts.slow_link;
    found.text +=
        ": more gradient_accumulation_steps, communication_data_type bf16, or a lower stage where memory allows";
  } else if (most == shares.files) {
    found.limit = Limit::files;
    found.text = format_text(
        "{:.3g} s of a step wait for files: a smaller share on nvme (offload_optimizer.ratio, deeptide.placement), a "
        "larger buffer_count, or another drive in nvme_path ('deeptide bench io')",
        shares.files);
  } else {
    found.limit = Limit::data;
    found.text = format_text(
        "{:.3g} s of a step pass between step() and forward: more workers in the data loader, or less work of the "
        "program's own there",
        shares.data);
  }
  return found;
}

}  // namespace

const char* text(Limit limit) {
  static constexpr const char* kNames[] = {"compute", "memory", "network", "waiting for a rank",
                                           "files",   "data",   "waiting"};
  return kNames[static_cast<size_t>(limit)];
}

LimitFound find_limit(const LimitFacts& facts) {
  const Shares shares = facts.times.empty() ? Shares() : shares_of(facts);
  if (shares.total <= 0.0) return {};
  LimitFound found;
  if (shares.late >= kLate * shares.total) {
    found = {.limit = Limit::late_rank,
             .rank = facts.ranks.at(shares.busiest),
             .share = shares.late / shares.total,
             .text = why_late(facts, shares.busiest)};
  } else {
    found = other_limit(facts, shares);
  }
  const std::string what = found.rank < 0 ? text(found.limit) : format_text("waiting for rank {}, which", found.rank);
  found.text =
      format_text("limited by {}{} {}; of a step's {:.3g} s: compute {}, {} {}, files {}, data {}", what,
                  found.rank < 0 ? ":" : "", found.text, shares.total, share_text(shares.computing, shares.total),
                  text(facts.has_stages ? Limit::stages : Limit::network), share_text(shares.waiting, shares.total),
                  share_text(shares.files, shares.total), share_text(shares.data, shares.total));
  return found;
}

}  // namespace deeptide::report
