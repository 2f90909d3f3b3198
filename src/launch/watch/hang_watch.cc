// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Queries all hosts in rounds, each of which ends with the last answer or at its deadline.
#include "launch/watch/hang_watch.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <sstream>

#include "base/libraries/nlohmann.h"
#include "launch/watch/hang_report.h"

namespace deeptide::launch {
namespace {

using std::chrono::seconds;

constexpr seconds kStatesLimit{3};
constexpr seconds kStacksLimit{6};  // two seconds for a rank that does not answer, the rest for a loaded machine
constexpr size_t kMaxRounds = 16;
constexpr double kWatch_s = 10.0;  // after which ranks measure nothing more for somebody who has gone

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.0f s", seconds);
  return text;
}

std::string command_text(const Options& options) {
  std::string text;
  for (const std::string& word : options.command) text += (text.empty() ? "" : " ") + word;
  return text;
}

std::vector<int> ranks_of(const HangWatch::Host& host) {
  std::vector<int> ranks;
  for (int i = 0; i < host.num_ranks; ++i) ranks.push_back(host.first_rank + i);
  return ranks;
}

}  // namespace

HangWatch::HangWatch(const Options& options, pid_t job, std::function<void(const std::string&)> say)
    : timeout_s_(options.hang_timeout_s),
      job_(job),
      command_(command_text(options)),
      say_(std::move(say)),
      socket_(job, [this](const std::string& question, Caller caller) { serve(question, std::move(caller)); }) {}

/// "ps", "stacks", "top", "trace 5 /folder".
void HangWatch::serve(const std::string& question, Caller caller) {
  if (question == "stacks") return begin(Purpose::stacks, std::move(caller));
  if (question == "top") return begin(Purpose::top, std::move(caller), {.watch_s = kWatch_s});
  std::istringstream words(question);
  std::string verb;
  StateQuestion wish;
  if (words >> verb >> wish.trace_steps && verb == "trace" && std::getline(words >> std::ws, wish.trace_folder)) {
    wish.trace_number = last_id_ + 1;  // the round's
    return begin(Purpose::trace, std::move(caller), wish);
  }
  begin(Purpose::ps, std::move(caller));
}

void HangWatch::watch(std::vector<Host> hosts, int world_size) {
  world_size_ = static_cast<size_t>(world_size);
  hosts_.clear();
  rounds_.clear();
  due_ = reported_ = grows_ = false;
  for (Host& host : hosts) hosts_.push_back({std::move(host)});
}

size_t HangWatch::add(Host host) {
  grows_ = true;
  auto place = std::find_if(hosts_.begin(), hosts_.end(), [&](const Watched& watched) {
    return watched.over && watched.host.first_rank == host.first_rank;
  });
  if (place == hosts_.end()) place = hosts_.insert(place, Watched{});
  *place = Watched{std::move(host)};
  return static_cast<size_t>(place - hosts_.begin());
}

void HangWatch::on_late(size_t host, double waited_s) {
  if (host >= hosts_.size()) return;
  due_ = due_ || waited_s > 0;
  hosts_[host].late_s = waited_s;
}

void HangWatch::on_answer(size_t host, const std::string& text) {
  if (host >= hosts_.size()) return;
  const StateAnswer answer = decode<StateAnswer>(text);
  const auto round = std::find_if(rounds_.begin(), rounds_.end(), [&](const Round& r) { return r.id == answer.id; });
  if (round == rounds_.end() || round->pending.erase(host) == 0) return;  // the answer arrived too late
  for (RankState state : answer.states) {
    state.host = hosts_[host].host.name;
    const auto known = std::find_if(round->states.begin(), round->states.end(),
                                    [&](const RankState& s) { return round->asked_stacks && s.rank == state.rank; });
    if (known == round->states.end()) {
      round->states.push_back(std::move(state));
    } else {  // keep its first state, which was read at the same time as the other ranks' states
      known->pid = state.pid;
      known->stacks = std::move(state.stacks);
    }
  }
}

void HangWatch::on_over(size_t host) {
  if (host >= hosts_.size()) return;
  hosts_[host].over = true;
  hosts_[host].late_s = 0.0;
  for (Round& round : rounds_) round.pending.erase(host);
}

void HangWatch::add_to(PollSet& set) {
  socket_.add_to(set);
  for (const Round& round : rounds_) set.wake_by(round.deadline);
}

void HangWatch::check() {
  const bool late = std::any_of(hosts_.begin(), hosts_.end(), [](const Watched& w) { return w.late_s > 0; });
  if (!late) reported_ = false;
  const bool asking = std::any_of(rounds_.begin(), rounds_.end(), [](auto& r) { return r.purpose == Purpose::hang; });
  if (late && due_ && !reported_ && !asking) begin(Purpose::hang, std::nullopt);
  due_ = due_ && asking;  // the new wait may have started after that round read the states
  for (auto round = rounds_.begin(); round != rounds_.end();) round = advance(*round) ? rounds_.erase(round) : ++round;
}

void HangWatch::begin(Purpose purpose, std::optional<Caller> caller, StateQuestion wish) {
  if (rounds_.size() >= kMaxRounds) return;
  Round& round = rounds_.emplace_back(Round{purpose, std::move(caller), std::move(wish)});
  round.id = ++last_id_;
  round.deadline = Clock::now() + kStatesLimit;
  for (size_t host = 0; host < hosts_.size(); ++host) ask(round, host, {});
}

void HangWatch::ask(Round& round, size_t host, const std::vector<int>& stacks_of) {
  if (hosts_[host].over) return;
  round.pending.insert(host);
  StateQuestion question = round.wish;
  question.id = round.id;
  question.stacks_of = stacks_of;
  hosts_[host].host.ask(question);
}

/// True if the round is over.
bool HangWatch::advance(Round& round) {
  while (round.pending.empty() || Clock::now() >= round.deadline) {
    round.silent.merge(round.pending);
    round.pending.clear();
    std::sort(round.states.begin(), round.states.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
    if (round.asked_stacks || !ask_stacks(round)) {
      close(round);
      return true;
    }
  }
  return false;
}

/// False if no host is left to query.
bool HangWatch::ask_stacks(Round& round) {
  if (round.purpose != Purpose::hang && round.purpose != Purpose::stacks) return false;
  if (round.purpose == Purpose::hang && round.silent.empty() && longest_wait(round.states) < timeout_s_) return false;
  std::map<size_t, std::vector<int>> wanted;
  for (const int rank : ranks_to_show(round.states)) {
    const auto host = std::find_if(hosts_.begin(), hosts_.end(), [rank](const Watched& w) {
      return rank >= w.host.first_rank && rank < w.host.first_rank + w.host.num_ranks;
    });
    if (host != hosts_.end()) wanted[static_cast<size_t>(host - hosts_.begin())].push_back(rank);
  }
  round.id = ++last_id_;
  round.asked_stacks = true;
  round.deadline = Clock::now() + kStacksLimit;
  for (const auto& [host, ranks] : wanted) ask(round, host, ranks);
  return true;
}

void HangWatch::close(Round& round) {
  if (round.purpose == Purpose::ps) return round.caller->answer(ps_line(round));
  if (round.purpose == Purpose::top) return round.caller->answer(top_text(round));
  if (round.purpose == Purpose::trace) return round.caller->answer(std::to_string(round.wish.trace_number));
  if (round.purpose == Purpose::stacks) return round.caller->answer(report_of(round));
  if (!round.asked_stacks) return;  // a rank has moved on meanwhile
  reported_ = true;
  double waited = longest_wait(round.states);
  for (const Watched& watched : hosts_) waited = std::max(waited, watched.late_s);
  say_("no collective has completed for " + seconds_text(waited) + " (--hang_timeout); state of the ranks:\n" +
       report_of(round));
}

/// Returns lines such as "ranks 2, 3 on worker-2: ended", one per host with chosen ranks.
std::string HangWatch::ranks_by_host(const std::string& what, const std::function<bool(size_t)>& chosen) const {
  std::map<std::string, std::vector<int>> ranks;
  for (size_t i = 0; i < hosts_.size(); ++i) {
    if (!chosen(i)) continue;
    for (const int rank : ranks_of(hosts_[i].host)) ranks[hosts_[i].host.name].push_back(rank);
  }
  std::string lines;
  for (auto& [name, of_host] : ranks) {
    std::sort(of_host.begin(), of_host.end());
    lines += ranks_text(of_host) + (name.empty() ? "" : " on " + name) + ": " + what + "\n";
  }
  return lines;
}

std::string HangWatch::report_of(const Round& round) const {
  if (hosts_.empty())
    return "no rank has started, or no rank under mpirun or srun could connect: run `deeptide stacks` on a rank's own "
           "host\n";
  std::string report = ranks_by_host("ended", [this](size_t host) { return hosts_[host].over; });
  report += ranks_by_host("no answer from the host", [&](size_t host) { return round.silent.count(host) > 0; });
  std::set<int> strangers;
  for (size_t rank = 0; grows_ && rank < world_size_; ++rank) strangers.insert(static_cast<int>(rank));
  for (const Watched& watched : hosts_) strangers.erase(watched.host.first_rank);
  if (!strangers.empty()) {
    report += ranks_text({strangers.begin(), strangers.end()}) +
              ": not connected to the launcher; run `deeptide stacks` on their hosts\n";
  }
  return report + hang_report(round.states, round.states.size() == world_size_);
}

std::string HangWatch::ps_line(const Round& round) const {
  int64_t step = 0;
  size_t ranks = 0;
  for (const RankState& state : round.states) {
    step = std::max(step, state.step);
    ranks += state.process != 'Z';
  }
  std::set<std::string> hosts, mute;
  for (size_t i = 0; i < hosts_.size(); ++i) {
    if (!hosts_[i].over) hosts.insert(hosts_[i].host.name);
    if (round.silent.count(i)) mute.insert(hosts_[i].host.name);
  }
  const std::string silent = mute.empty() ? "" : " (" + std::to_string(mute.size()) + " silent)";
  const double age = std::chrono::duration<double>(Clock::now() - started_).count();
  return std::to_string(job_) + "\t" + std::to_string(hosts.size()) + silent + "\t" + std::to_string(ranks) + "\t" +
         std::to_string(step) + "\t" + seconds_text(longest_wait(round.states)) + "\t" + seconds_text(age) + "\t" +
         command_ + "\n";
}

/// JSON, which `deeptide top` and `deeptide trace` read.
std::string HangWatch::top_text(const Round& round) const {
  nlohmann::json job = {{"job", job_},
                        {"command", command_},
                        {"age_s", std::chrono::duration<double>(Clock::now() - started_).count()},
                        {"world", world_size_},
                        {"ranks", nlohmann::json::array()},
                        {"silent", nlohmann::json::array()}};
  for (const size_t host : round.silent) job["silent"].push_back(hosts_[host].host.name);
  for (const RankState& state : round.states) {
    nlohmann::json rank = {
        {"rank", state.rank},     {"host", state.host},        {"process", std::string(1, state.process)},
        {"step", state.step},     {"phase", state.phase},      {"module", state.module},
        {"traced", state.traced}, {"silent_s", state.silent_s}};
    if (state.waiting) {
      rank["waiting"] = {{"operation", state.waiting->operation},
                         {"unit", state.waiting->unit},
                         {"waited_s", state.waiting->waited_s}};
    }
    if (const auto& link = state.slow_link) {
      job["slow_link"] = {
          {"from", link->from}, {"to", link->to}, {"bytes_per_s", link->bytes_per_s}, {"others", link->others}};
    }
    if (state.last_step) rank["last_step"] = facts_json(*state.last_step);
    job["ranks"].push_back(std::move(rank));
  }
  return write_json(job, -1, nlohmann::json::error_handler_t::replace);
}

}  // namespace deeptide::launch
