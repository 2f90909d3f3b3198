// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs one transport per channel. No other file waits on peers.
#include "comm/group.h"

#include <ATen/ops/zeros.h>
#include <sched.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "base/interrupt.h"
#include "base/invariant.h"
#include "base/libraries/format.h"
#include "base/text.h"
#include "comm/blocking.h"
#include "host/host.h"
#include "world/failure_board.h"

namespace deeptide::comm {

using at::Tensor;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

// The transport times out after us: our error carries more.
constexpr milliseconds kTransportGrace{2000};
constexpr milliseconds kMeanwhile{5};
constexpr milliseconds kLateParts{10'000};  // of a rank that has ended: a gigabyte at 1 Gbit/s

/// Whether all ranks are on this host, so that no name needs resolving.
bool is_local(const World& world) {
  const char* address = std::getenv("MASTER_ADDR");
  return world.source == "threads" ||
         (address && (!std::strcmp(address, "127.0.0.1") || !std::strcmp(address, "localhost")));
}

/// Threads that start meanwhile move bytes in the background: they run at once where a core is idle, but never take one
/// from a thread that computes because a few bytes arrived. When their turn comes, more have.
class BackgroundThreads {
 public:
  BackgroundThreads() : policy_(sched_getscheduler(0)) {
    if (policy_ == SCHED_OTHER) set(SCHED_BATCH);
  }
  ~BackgroundThreads() {
    if (policy_ == SCHED_OTHER) set(SCHED_OTHER);
  }
  BackgroundThreads(const BackgroundThreads&) = delete;

 private:
  static void set(int policy) {
    const sched_param priority{};
    sched_setscheduler(0, policy, &priority);  // where it is denied, threads are as all others
  }

  int policy_;
};

/// A connection that a peer closes fails the exchange; it must not end the program: gloo writes without MSG_NOSIGNAL.
/// A program that has a handler of its own keeps it.
void ignore_broken_pipes() {
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) != 0) return;
  if ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, nullptr);
}

/// One for each interface that the variable names, as torch reads it; else the one that reaches the other ranks.
std::vector<std::shared_ptr<gloo::transport::Device>> make_devices(const World& world) {
  using Gloo = c10d::ProcessGroupGloo;
  std::vector<std::shared_ptr<gloo::transport::Device>> devices;
  if (const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME")) {
    for (const std::string& name : split(interfaces, ',')) devices.push_back(Gloo::createDeviceForInterface(name));
  } else {
    devices.push_back(is_local(world) ? Gloo::createDeviceForHostname("127.0.0.1") : Gloo::createDefaultDevice());
  }
  return devices;
}

/// `ranks`: of the world; this one is at `rank`.
Network make_gloo(const World& world, const std::string& name, int rank, std::vector<int> ranks,
                  const ChannelOptions& channel) {
  ignore_broken_pipes();
  std::optional<BackgroundThreads> scope;
  if (channel.on_device) scope.emplace();  // others carry few bytes, and ranks wait for them
  auto options = c10d::ProcessGroupGloo::Options::create(channel.timeout + kTransportGrace);
  options->devices = make_devices(world);
  options->threads = 1;  // a channel's collectives run in order anyway; fewer threads leave the cores to compute
  auto store = c10::make_intrusive<c10d::PrefixStore>("deeptide/" + name, world.store);
  const int num_devices = static_cast<int>(options->devices.size());
  return {.backend = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, static_cast<int>(ranks.size()), options),
          .ranks = std::move(ranks),
          .num_devices = num_devices,
          .links = channel.links};
}

/// Asserts what every transport assumes: transports only move bytes.
void check(const Tensor& one, int64_t factor, const Tensor& other) {
  DEEPTIDE_INVARIANT(one.is_contiguous() && other.is_contiguous(), "collectives take contiguous tensors");
  DEEPTIDE_INVARIANT(one.numel() * factor == other.numel() && one.scalar_type() == other.scalar_type() &&
                         one.device() == other.device(),
                     "a collective of ", one.toString(), one.sizes(), " and ", other.toString(), other.sizes(),
                     ": expected ", factor, " times as many elements in the second");
}

/// `own` is the world as the team sees it.
std::unique_ptr<Transport> make_transport(const World& own, const Team& team, const std::string& name,
                                          const ChannelOptions& options) {
  const auto& host = options.host;
  if (options.on_device && own.make_backend) {
    return make_c10d_transport({.backend = own.make_backend(team.ranks(), name), .ranks = team.ranks()});
  }
  if (host && host->holds_all()) return make_host_transport(host, options.peers);
  const bool two_levels = host && host->size() > 1 && host->is_uniform();
  if (!two_levels) return make_c10d_transport(make_gloo(own, name, team.index(), team.ranks(), options));
  const std::string rail = name + "/rail/" + std::to_string(host->index());
  std::vector<int> peers;
  for (const auto& ranks : host->hosts()) peers.push_back(team.ranks()[ranks[host->index()]]);
  std::optional<Network> all;
  if (options.peers == PeerTraffic::yes) all = make_gloo(own, name + "/peers", team.index(), team.ranks(), options);
  return make_two_level_transport(host, make_gloo(own, rail, host->host_index(), std::move(peers), options),
                                  std::move(all));
}

/// Makes the transport on a thread of its own: Gloo connects, or waits for ranks that never come, without a look at
/// signals. Returns null with the text of the failure, which is empty where the system refuses a thread.
std::unique_ptr<Transport> connect(const World& own, const Team& team, const std::string& name,
                                   const ChannelOptions& options, std::string& failure) {
  using Made = std::pair<std::unique_ptr<Transport>, std::string>;
  Made made = run_beside<Made>(
      [own, team, name, options]() -> Made {
        try {
          return {make_transport(own, team, name, options), ""};
        } catch (const std::system_error& error) {
          const bool refused = error.code() == std::errc::resource_unavailable_try_again;
          return {nullptr, refused ? "" : error.what()};
        } catch (const std::exception& error) {
          return {nullptr, error.what()};
        }
      },
      &check_interrupts);
  failure = std::move(made.second);
  return std::move(made.first);
}

// Maps "1/gathers" to "gathers", and a second engine's "2/gathers" to "gathers 2": each engine counts separately.
std::string channel_of(const std::string& name) {
  const size_t slash = name.rfind('/');
  if (slash == std::string::npos) return name;
  const std::string owner = name.substr(0, slash);
  return name.substr(slash + 1) + (owner == "1" ? "" : " " + owner);
}

/// Adds its life to what its thread has waited.
class Waiting {
 public:
  Waiting() = default;
  Waiting(const Waiting&) = delete;
  ~Waiting() { total_s += std::chrono::duration<double>(steady_clock::now() - begin_).count(); }

  static inline thread_local double total_s = 0.0;

 private:
  const steady_clock::time_point begin_ = steady_clock::now();
};

}  // namespace

double waited_by_this_thread() { return Waiting::total_s; }

bool Pending::advance(milliseconds limit) {
  if (operation_ == nullptr) return true;
  if (!operation_->advance(limit)) return false;
  operation_.reset();
  note_end();
  return true;
}

void Pending::note_end() {
  trace::flight_log().end(ticket_);
  if (recorder_) recorder_->note_collective(kind_, channel_, ranks_, bytes_, begin_ns_);
  recorder_.reset();
}

bool Pending::wait_for(milliseconds limit) {
  try {
    return advance(limit);
  } catch (const TransportError&) {
    std::this_thread::sleep_for(limit);
    return false;
  }
}

Group::Group(const World& world, Team team, const std::string& name, ChannelOptions options)
    : team_(std::move(team)), options_(std::move(options)), channel_(channel_of(name)) {
  if (size() == 1) {
    transport_ = make_loopback_transport();
    return;
  }
  token_ = at::zeros({1}, at::kByte);
  tokens_ = at::zeros({size()}, at::kByte);
  std::string failure;
  run_blocking([&] { transport_ = connect(team_.within(world), team_, name, options_, failure); });
  if (transport_) return;
  const std::string rank = rank_name() + " of " + std::to_string(world.size);
  if (failure.empty()) {
    throw CommError(rank + " could not connect group '" + name +
                    "': the system refuses the thread that would serve it");
  }
  throw CommError(rank + " could not connect group '" + name + "' within " + std::to_string(options_.timeout.count()) +
                  " ms: " + failure +
                  ". Check that all ranks run and reach each other (GLOO_SOCKET_IFNAME selects the "
                  "interface, or several, separated by commas, equally many on each host).");
}

Group::~Group() = default;

/// By default a rank sends all but its own part of what a collective makes whole or takes apart.
Pending Group::track(OperationPtr under_way, const char* operation, int64_t bytes, std::optional<int64_t> sent) {
  return logged(std::move(under_way), operation, bytes, sent.value_or(bytes / size() * (size() - 1)));
}

Pending Group::logged(OperationPtr under_way, const char* operation, int64_t bytes, int64_t sent) {
  sent_bytes_ += sent;
  if (under_way == nullptr) return {};
  Pending pending(std::move(under_way));
  trace::Flight flight;
  flight.operation = operation;
  flight.channel = channel_;
  flight.bytes = bytes;
  flight.sequence = ++sequence_;
  flight.rank = team_.rank();
  pending.ticket_ = trace::flight_log().begin(flight);
  if (!options_.recorder || !options_.recorder->is_on()) return pending;
  pending.recorder_ = options_.recorder;
  pending.kind_ = operation;
  pending.channel_ = channel_;
  pending.ranks_ = size();
  pending.bytes_ = bytes;
  pending.begin_ns_ = trace::now_ns();
  return pending;
}

Pending Group::all_gather(Tensor output, Tensor input, OwnRow own) {
  check(input, size(), output);
  const auto bytes = static_cast<int64_t>(output.nbytes());
  return track(transport_->all_gather(std::move(output), std::move(input), own), "all-gather", bytes);
}

Pending Group::all_to_all(Tensor output, Tensor input, OwnRow own) {
  check(input, 1, output);
  DEEPTIDE_INVARIANT(input.numel() % size() == 0, "all_to_all of ", input.numel(), " elements among ", size(),
                     " ranks");
  const auto bytes = static_cast<int64_t>(input.nbytes());
  return track(transport_->all_to_all(std::move(output), std::move(input), own), "all-to-all", bytes);
}

Pending Group::reduce_scatter(Tensor output, Tensor input) {
  check(output, size(), input);
  const auto bytes = static_cast<int64_t>(input.nbytes());
  return track(transport_->reduce_scatter(std::move(output), std::move(input)), "reduce-scatter", bytes);
}

Pending Group::broadcast(Tensor tensor, int root) {
  check(tensor, 1, tensor);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const int64_t sent = index() == root ? bytes * (size() - 1) : 0;
  return logged(transport_->broadcast(std::move(tensor), root), "broadcast", bytes, sent);
}

Pending Group::send(Tensor tensor, int to) {
  check(tensor, 1, tensor);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  return logged(transport_->send(std::move(tensor), to), "send", bytes, bytes);
}

Pending Group::receive(Tensor tensor, int from) {
  check(tensor, 1, tensor);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  return logged(transport_->receive(std::move(tensor), from), "receive", bytes, /*sent=*/0);
}

void Group::barrier(const Site& site) {
  if (size() == 1) return;
  auto pending = all_gather(tokens_, token_);
  wait(pending, site);
}

std::string Group::name_of(int rank) const {
  return options_.board ? options_.board->name(rank) : "rank " + std::to_string(rank);
}

std::string Group::text(const Site& site) const {
  const std::string engine = options_.board ? options_.board->engine() : "";
  return engine + "step " + std::to_string(step()) + ", " + site.phase + ", " + site.what;
}

bool Group::wait_for(Pending& pending, milliseconds limit, const Site& site) {
  if (!pending.valid()) return true;
  trace::flight_log().waiting(pending.ticket_, step(), site.phase, site.what);
  const auto end = steady_clock::now() + limit;
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(end - steady_clock::now());
    if (advance(pending, std::clamp(left, milliseconds(0), kInterruptPeriod), site)) return true;
    check_interrupts();
    if (steady_clock::now() >= end) return false;
  }
}

bool Group::advance(Pending& pending, milliseconds limit, const Site& site) {
  std::string failure;
  bool done = false;
  run_blocking([&] {
    const Waiting waiting;
    const trace::Span span(recorder(), trace::Work::wait, site.what);
    try {
      done = pending.operation_->advance(limit);
    } catch (const TransportError& error) {
      failure = error.what();
    }
  });
  if (done || !failure.empty()) pending.note_end();
  if (!failure.empty()) {
    throw_comm_error(rank_name() + " lost its peers at " + text(site) + ": " + find_cause(site) +
                     ". Transport: " + failure);
  }
  if (done) pending = Pending();
  return done;
}

void Group::order_before(const device::Lane& lane, Pending& pending, const Site& site,
                         const std::function<void()>& meanwhile) {
  if (!pending.valid()) return;
  if (!pending.operation_->order_before(lane)) return wait(pending, site, meanwhile);
  pending.note_end();
  pending = Pending();
}

Wait::Wait(Group& group, Pending& pending, Site site, std::optional<int> peer)
    : group_(group),
      pending_(pending),
      site_(std::move(site)),
      peer_(peer),
      begin_(Clock::now()),
      period_(std::min(world::kPollFailures, group.options_.timeout)),
      look_(begin_ + period_) {}

bool Wait::go_on(milliseconds limit) {
  if (group_.wait_for(pending_, std::min(limit, period_), site_)) return true;
  const auto now = Clock::now();
  if (now < look_) return false;
  look_ += period_;
  look_at_board(now);
  if (now - begin_ > group_.options_.timeout) group_.time_out(site_);
  return false;
}

/// A rank that ended after its part may be reported before that part, or others', has come over a slow link. One that
/// ended before its part breaks its connections.
void Wait::look_at_board(Clock::time_point now) {
  world::FailureBoard& board = *group_.options_.board;
  const std::vector<int>& team = group_.team_.ranks();
  const auto awaited = peer_ ? std::vector<int>{team[*peer_]} : team;
  auto failure = board.failure_among(awaited, "waits: " + group_.text(site_));
  const std::string phase = site_.phase;
  bool has_lost = false;  // and the grace is over, in which parts may come late
  if (!failure && (phase == "pipeline" || phase == "step")) has_lost = (failure = board.lost_step(awaited)).has_value();
  if (!failure) return;
  if (!reported_) reported_ = now;
  const bool may_come = group_.transport_->crosses_hosts() && !has_lost && !board.is_failure();
  if (now - *reported_ < (may_come ? kLateParts : period_)) return;
  throw_comm_error(group_.rank_name() + " stopped at " + group_.text(site_) + ": " + group_.find_cause(site_, failure));
}

void Group::wait(Pending& pending, const Site& site, const std::function<void()>& meanwhile) {
  Wait wait(*this, pending, site);
  if (meanwhile) meanwhile();
  while (!wait.go_on(meanwhile ? kMeanwhile : world::kPollFailures)) {
    if (meanwhile) meanwhile();
  }
}

std::optional<std::string> Group::find_killed() const {
  auto killed = options_.host ? options_.host->find_killed() : std::nullopt;
  if (!killed) return killed;
  if (const auto error = options_.board->error()) *killed += "; " + *error;
  return killed;
}

std::optional<int> Group::find_process(int rank) const {
  return options_.host ? options_.host->find_process(rank) : std::nullopt;
}

std::string Group::find_cause(const Site& site, std::optional<std::string> reported) const {
  world::FailureBoard& board = *options_.board;
  if (!reported) {
    const auto error = board.error();
    reported = board.failure();
    if (error && !board.is_failure()) reported = error;
  }
  // A diagnosis takes half a second and writes to the store: skip it if a rank has reported the cause.
  const bool is_known = reported && !find_killed() && board.is_reachable();
  const std::string cause = is_known ? *reported
                                     : board.diagnose(
                                           "waits: " + text(site), [this] { return find_killed(); },
                                           [this](int rank) { return find_process(rank); });
  board.note_cause(cause);
  return cause;
}

void Group::time_out(const Site& site) const {
  throw_comm_error(
      format_text("{} timed out after {:g} s at {}: {}. The limit is \"deeptide\": {{\"comm_timeout\": seconds}}.",
                  rank_name(), std::chrono::duration<double>(options_.timeout).count(), text(site), find_cause(site)));
}

}  // namespace deeptide::comm
