// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Serves all connections in one loop: hello from all, a port from the first, the start to all; then output and ends.
#include "launch/job/job_attempt.h"

#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <filesystem>

#include "base/sha256.h"
#include "deeptide/discovery.h"
#include "launch/machine/machine.h"
#include "launch/plan/exports.h"
#include "launch/plan/host_commands.h"
#include "launch/system/report.h"
#include "launch/system/shell.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

using std::chrono::seconds;

constexpr seconds kConnectLimit{30};
constexpr seconds kPrepareLimit{10};
constexpr seconds kKillLimit{3};  // limit for an agent to report the end of its ranks after the kill
constexpr std::chrono::milliseconds kFarewell{1000};

std::string count_text(size_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

}  // namespace

JobAttempt::JobAttempt(const AttemptContext& context, const std::vector<Host>& hosts)
    : context_(context), ending_({.slack = kKillLimit, .kill = kKillLimit}) {
  events_.frame = [this](AgentLink& link, const Frame& frame) { on_frame(link, frame); };
  events_.changed = [this](AgentLink& link) { on_changed(link); };
  events_.noise = [this](AgentLink& link, const std::string& line) {
    context_.output.say(LogLevel::info, link.host().name + ": " + line);
  };
  for (const Host& host : hosts) links_.push_back(std::make_unique<AgentLink>(host, events_));
  deadline_ = Clock::now() + kConnectLimit;
}

AttemptResult JobAttempt::run() {
  connect();
  while (!all_over()) serve_once();
  context_.watch.watch({}, 0);
  close_links();
  context_.output.finish();
  AttemptResult result;
  if (!refusal_.empty()) {
    context_.output.say(LogLevel::critical, refusal_);
    result.exit_code = kExitUsage;
  } else if (failures_.failed()) {
    failures_.print(context_.output);
    result = {failures_.exit_code(), !stop_signal_ && !too_few_hosts_};
  } else if (stop_signal_) {
    result.exit_code = own_end_.code().value_or(128 + *stop_signal_);
  } else if (context_.output.output_closed()) {
    result.exit_code = 128 + SIGPIPE;
  }
  return result;
}

void JobAttempt::connect() {
  const Options& options = context_.options;
  if (options.transport == Transport::pdsh) {
    std::vector<Host> hosts;
    for (const auto& link : links_) hosts.push_back(link->host());
    const auto on_end = [this](int code) {
      for (const auto& link : links_) {
        if (link->state() != AgentLink::State::connecting) continue;
        link->lose("cannot be reached by pdsh (exit code " + std::to_string(code) + "); does `pdsh -R ssh -w " +
                   link->host().name + " true` work?");
      }
    };
    prctl(PR_SET_CHILD_SUBREAPER, 1);  // this process adopts pdsh's ssh processes when pdsh ends
    pdsh_ = std::make_unique<PdshHub>(
        options, hosts, [this](size_t index, int socket) { links_[index]->attach(socket); },
        [this](const std::string& line) { context_.output.say(LogLevel::info, line); }, on_end);
    return;
  }
  require_program("ssh", "ssh");
  for (const auto& link : links_) {
    std::vector<std::string> command = agent_command(options, link->host().name);
    context_.output.say(LogLevel::debug, shell_join(command));
    command[0] = find_program(command[0]);
    link->connect_by(command);
  }
}

void JobAttempt::serve_once() {
  PollSet set;
  const bool full = context_.output.full();
  set.add(context_.signals.fd(), POLLIN, [this] {
    for (int signal : context_.signals.read()) on_signal(signal);
  });
  for (const auto& link : links_) link->add_to(set, !full);
  if (pdsh_) pdsh_->add_to(set);
  context_.output.add_to(set);
  context_.watch.add_to(set);
  if (stage_ != Stage::running && !ending_.asked()) set.wake_by(deadline_);
  if (ending_.deadline()) set.wake_by(*ending_.deadline());
  set.wait();
  for (const auto& link : links_) {
    if (full) link->forgive_silence();  // nothing was read from it in this round
    link->check_time(context_.options.heartbeat_timeout_s);
  }
  context_.watch.check();
  if (stage_ == Stage::connecting && !ending_.asked()) check_connected();
  check_deadlines();
  if (!ending_.asked() && context_.output.closed()) stop(SIGTERM, context_.options.stop_grace_s());
}

void JobAttempt::on_frame(AgentLink& link, const Frame& frame) {
  switch (frame.kind) {
    case FrameKind::output:
      return context_.output.feed(frame.rank, Stream::output, frame.payload);
    case FrameKind::errors:
      return context_.output.feed(frame.rank, Stream::errors, frame.payload);
    case FrameKind::port:
      if (stage_ == Stage::preparing && !ending_.asked() && &link == &first_link())
        start(decode<PortAnswer>(frame.payload).port);
      return;
    case FrameKind::exited:
      return on_rank_exit(link, frame.rank, decode<RankExit>(frame.payload));
    case FrameKind::late:
      return context_.watch.on_late(index_of(link), decode<Late>(frame.payload).waited_s);
    case FrameKind::states:
      return context_.watch.on_answer(index_of(link), frame.payload);
    case FrameKind::done:
      return context_.watch.on_over(index_of(link));
    default:
      return;
  }
}

void JobAttempt::on_rank_exit(AgentLink& link, int rank, const RankExit& exit) {
  link.num_running = std::max(0, link.num_running - 1);
  context_.output.say(LogLevel::debug,
                      "rank " + std::to_string(rank) + " on " + link.host().name + " " + exit.status.text());
  if (stop_signal_) return own_end_.add(exit.status);
  // An agent asks its ranks to end when one fails or when the launcher requests it. Those ends are not failures.
  const bool obeyed = exit.asked && (exit.status.signal == SIGTERM || exit.status.signal == SIGKILL);
  if (obeyed && !exit.status.out_of_memory) return;
  failures_.on_exit(rank, link.host().name, exit.status, num_running(), exit.place);
  if (failures_.failed()) ending_.warn(Clock::now(), {SIGTERM, context_.options.failure_grace_s()});
}

void JobAttempt::on_changed(AgentLink& link) {
  link.num_running = 0;
  context_.watch.on_over(index_of(link));
  const std::string text = "host " + link.host().name + " " + link.why();
  const bool connecting = stage_ == Stage::connecting && !ending_.asked();
  if (connecting && context_.options.elastic && link.state() == AgentLink::State::lost) {
    return context_.output.say(LogLevel::warning, text + "; continuing without it");
  }
  if (ending_.asked()) return;
  if (link.state() == AgentLink::State::refused) {
    if (refusal_.empty()) refusal_ = "host " + link.host().name + ": " + link.why();
  } else {
    failures_.on_lost_host(link.host().name, link.why());
  }
  stop(SIGTERM, context_.options.failure_grace_s());
}

void JobAttempt::on_signal(int signal) {
  if (signal == SIGCHLD) return;  // an ssh has ended, and its pipes close
  if (signal == SIGTSTP) {
    for (const auto& link : links_) link->send(FrameKind::suspend);
    serve_once();  // sends the frames before this process stops
    raise(SIGSTOP);
    for (const auto& link : links_) {
      link->send(FrameKind::resume);
      link->forgive_silence();
    }
    return;
  }
  if (stop_signal_ == signal && Clock::now() - stopped_at_ < kSameSignal) return;
  if (stop_signal_) return kill();
  stop_signal_ = signal;
  stopped_at_ = Clock::now();
  if (ending_.asked()) return;
  if (signal == SIGINT) context_.output.say(LogLevel::info, "stopping; press ^C again to kill the ranks at once");
  stop(signal == SIGINT ? SIGINT : SIGTERM, context_.options.stop_grace_s());
}

void JobAttempt::check_connected() {
  size_t connecting = 0;
  std::vector<Host> reached;
  for (const auto& link : links_) {
    connecting += link->state() == AgentLink::State::connecting;
    if (link->state() == AgentLink::State::ready) reached.push_back(link->host());
  }
  if (connecting > 0) return;
  const std::vector<Host> chosen = reached.size() < context_.min_hosts ? std::vector<Host>{} : context_.choose(reached);
  if (chosen.empty()) {
    too_few_hosts_ = true;
    failures_.on_lost_host(links_.front()->host().name,
                           "and others are unavailable: only " + std::to_string(reached.size()) + " of " +
                               count_text(links_.size(), "host") + " can be used, too few to continue");
    return stop(SIGTERM, 0);
  }
  int rank = 0, node = 0;
  const int world = num_slots(chosen);
  for (const auto& link : links_) {
    const auto host =
        std::find_if(chosen.begin(), chosen.end(), [&](const Host& h) { return h.name == link->host().name; });
    if (host == chosen.end()) {
      link->send(FrameKind::kill);  // not needed in this attempt
      link->set_state(AgentLink::State::ended);
      continue;
    }
    link->place.node_rank = node++;
    link->place.num_nodes = static_cast<int>(chosen.size());
    link->place.first_rank = rank;
    link->place.num_ranks = static_cast<int>(host->slots.size());
    link->place.world_size = world;
    link->place.devices = host->slots;
    rank += link->place.num_ranks;
    used_.push_back(link.get());
  }
  prepare();
}

AgentLink& JobAttempt::first_link() { return *used_.front(); }

void JobAttempt::prepare() {
  stage_ = Stage::preparing;
  deadline_ = Clock::now() + kPrepareLimit;
  const int wanted = context_.options.master_port;
  first_link().send(FrameKind::prepare,
                    encode(PortRequest{.port = wanted ? wanted : kDefaultPort, .fixed = wanted != 0}));
}

void JobAttempt::start(int master_port) {
  const Options& options = context_.options;
  std::string address = options.master_addr;
  if (address.empty() && used_.size() == 1) address = "127.0.0.1";
  if (address.empty() && !first_link().addresses.empty()) address = first_link().addresses.front();
  if (address.empty()) {
    return first_link().lose("has only loopback addresses; give --master_addr");
  }
  AgentJob job{.options = options, .place = {}, .folder = std::filesystem::current_path()};
  Environment environment = exported_environment();
  environment["DEEPTIDE_JOB_TOKEN"] = random_hex(16);
  environment["DEEPTIDE_RESTART_COUNT"] = std::to_string(context_.restarts);
  for (AgentLink* link : used_) {
    link->place.master_addr = address;
    link->place.master_port = master_port;
    link->place.environment = environment;
    for (int i = 0; i < link->place.num_ranks; ++i) {
      const int rank = link->place.first_rank + i;
      context_.output.add_rank(rank, rank_prefix(rank), false);
    }
    job.place = link->place;
    link->num_running = link->place.num_ranks;
    link->send(FrameKind::start, encode(job));
    link->set_state(AgentLink::State::running);
  }
  stage_ = Stage::running;
  start_watch();
  context_.output.say(LogLevel::info, count_text(first_link().place.world_size, "rank") + " on " +
                                          count_text(used_.size(), "host") + ", meeting at " + address + ":" +
                                          std::to_string(master_port));
}

void JobAttempt::start_watch() {
  std::vector<HangWatch::Host> hosts;
  for (AgentLink* link : used_) {
    hosts.push_back({link->host().name, link->place.first_rank, link->place.num_ranks,
                     [link](const StateQuestion& question) { link->send(FrameKind::ask, encode(question)); }});
  }
  context_.watch.watch(std::move(hosts), first_link().place.world_size);
}

size_t JobAttempt::index_of(const AgentLink& link) const {
  return static_cast<size_t>(std::find(used_.begin(), used_.end(), &link) - used_.begin());
}

void JobAttempt::stop(int signal, double grace_s) {
  if (ending_.stop(Clock::now(), {signal, grace_s})) ask_to_end();
}

void JobAttempt::ask_to_end() {
  const std::string how = encode(ending_.request());
  for (const auto& link : links_) {
    if (link->state() == AgentLink::State::connecting) {
      link->lose("is no longer needed");
    } else {
      link->send(FrameKind::stop, how);
    }
  }
}

void JobAttempt::kill() {
  ending_.kill(Clock::now());
  for (const auto& link : links_) link->send(FrameKind::kill);
}

void JobAttempt::give_up() {
  for (const auto& link : links_) {
    if (!link->over()) link->lose("did not end its ranks in time");
  }
}

void JobAttempt::check_deadlines() {
  switch (ending_.check(Clock::now())) {
    case Ending::Due::stop:
      return ask_to_end();
    case Ending::Due::kill:
      return kill();
    case Ending::Due::give_up:
      return give_up();
    case Ending::Due::nothing:
      return check_answers();
  }
}

/// Declares a host lost that has not connected, or the first host if it has not found a port.
void JobAttempt::check_answers() {
  if (ending_.asked() || stage_ == Stage::running || Clock::now() < deadline_) return;
  for (const auto& link : links_) {
    if (link->over()) continue;
    if (stage_ == Stage::connecting && link->state() != AgentLink::State::connecting) continue;
    if (stage_ == Stage::preparing && link.get() != &first_link()) continue;
    return link->lose("did not answer in time");  // this also stops the others
  }
}

void JobAttempt::close_links() {
  const auto limit = Clock::now() + kFarewell;
  for (const auto& link : links_) link->close(limit);
  if (pdsh_) pdsh_->close(limit);
}

bool JobAttempt::all_over() const {
  return std::all_of(links_.begin(), links_.end(), [](const auto& link) { return link->over(); });
}

size_t JobAttempt::num_running() const {
  size_t running = 0;
  for (const auto& link : links_) running += link->num_running;
  return running;
}

}  // namespace deeptide::launch
