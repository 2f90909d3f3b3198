// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Compares what the ranks say about their links.
#include "engine/step/link_report.h"

#include <ATen/ops/empty.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/libraries/format.h"
#include "base/text.h"
#include "trace/flight_log.h"

namespace deeptide::engine {

using at::Tensor;

namespace {

constexpr size_t kNameBytes = 64;
constexpr size_t kMostNamed = 4;  // links whose bytes are given

std::string own_name(const World& world) {
  if (!world.host.empty()) return world.host;
  char name[kNameBytes] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

/// Collective.
std::vector<std::string> gather_names(Channels& channels) {
  const auto ranks = static_cast<size_t>(channels.data().size());
  const Tensor own = at::empty({static_cast<int64_t>(kNameBytes)}, at::kByte);
  const Tensor all = at::empty({static_cast<int64_t>(kNameBytes * ranks)}, at::kByte);
  std::memset(own.mutable_data_ptr(), 0, kNameBytes);
  const std::string name = own_name(channels.world()).substr(0, kNameBytes - 1);
  std::memcpy(own.mutable_data_ptr(), name.data(), name.size());
  comm::Pending pending = channels.control().all_gather(all, own);
  channels.control().wait(pending, {"start", "exchanging the hosts' names"});
  std::vector<std::string> names;
  for (size_t i = 0; i < ranks; ++i)
    names.emplace_back(static_cast<const char*>(all.const_data_ptr()) + i * kNameBytes);
  return names;
}

std::string rate_text(double bytes_per_s) { return bytes_text(static_cast<int64_t>(bytes_per_s)) + "/s"; }

}  // namespace

LinkReport::LinkReport(Channels& channels) : channels_(channels) {
  if (channels.are_between_hosts()) names_ = gather_names(channels);
}

comm::LinkFacts LinkReport::own_facts() {
  if (names_.empty()) return {};
  comm::LinkFacts facts = channels_.links()->facts();
  const auto now = std::chrono::steady_clock::now();
  const double waited_s = comm::waited_by_this_thread();
  if (num_steps_++ == 0) {
    begin_ = now;
    waited_s_ = waited_s;
    return facts;
  }
  const double elapsed_s = std::chrono::duration<double>(now - begin_).count();
  const auto steps = static_cast<double>(num_steps_ - 1);
  step_s_ = elapsed_s / steps;
  facts.computing_s = static_cast<float>((elapsed_s - (waited_s - waited_s_)) / steps);
  return facts;
}

void LinkReport::note(const std::vector<comm::Verdict>& verdicts) {
  if (names_.empty()) return;
  facts_.clear();
  for (const comm::Verdict& verdict : verdicts) facts_.push_back(verdict.links);
  const auto slow = comm::find_slow_link(facts_);
  const comm::LinkFacts link = slow ? facts_[slow->to] : comm::LinkFacts();
  trace::flight_log().slow_link(link.slow_from, slow ? channels_.data().ranks()[slow->to] : -1, link.rate,
                                slow ? slow->others : 0.0);
}

std::string LinkReport::rank_text(int rank) const {
  const auto& ranks = channels_.data().ranks();
  const auto at = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
  return format_text("{} on {}", channels_.mesh().name(rank), names_.at(static_cast<size_t>(at)));
}

std::string LinkReport::volume_text() const {
  std::string text;
  size_t named = 0;
  const auto uses = channels_.links()->uses();
  for (const auto& [rank, use] : uses) {
    if (++named > kMostNamed) break;
    text += format_text("{}{} to {}", named == 1 ? "" : ", ", bytes_text(use.sent_bytes), channels_.mesh().name(rank));
  }
  if (uses.size() > kMostNamed) {
    text += format_text(", {} to all {}", bytes_text(channels_.links()->sent_bytes()), uses.size());
  }
  return format_text("{} has sent {}", channels_.mesh().name(channels_.world().rank), text);
}

std::string LinkReport::rank_at(size_t index) const { return rank_text(channels_.data().ranks()[index]); }

std::string LinkReport::text() const {
  if (facts_.empty()) return "";
  std::string text = "links: " + volume_text();
  if (const std::string slow = slow_text(); !slow.empty()) text += "; slow " + slow;
  return text + late_text();
}

std::string LinkReport::slow_text() const {
  const auto slow = comm::find_slow_link(facts_);
  if (!slow) return "";
  const comm::LinkFacts& link = facts_[slow->to];
  return format_text("from {} to {}, {} (others {})", rank_text(link.slow_from), rank_at(slow->to),
                     rate_text(link.rate), rate_text(slow->others));
}

std::string LinkReport::late_text() const {
  const auto late = comm::find_late_rank(facts_, step_s_);
  if (!late || num_steps_ < 2) return "";
  return format_text("; late: {} computes for {:.3g} s per step (others {:.3g} s)", rank_at(late->rank),
                     facts_[late->rank].computing_s, late->others_s);
}

}  // namespace deeptide::engine
