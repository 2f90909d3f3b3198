// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Collectives with a timeout on every wait and errors that name ranks, step, phase and module.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/clock.h"
#include "comm/team.h"
#include "comm/transport/transport.h"
#include "deeptide/world.h"
#include "trace/flight_log.h"
#include "trace/recorder.h"

namespace deeptide::world {
class FailureBoard;
}  // namespace deeptide::world

namespace deeptide::comm {

/// The place and purpose of a wait. An error adds the rank and the step.
struct Site {
  const char* phase = "start";  // "forward", "backward", "step", "eval", "checkpoint", "start"
  std::string what;             // "gathering unit h.3 for h.3.attn.qkv.weight"
};

/// A collective under way. Keeps its tensors alive. Movable. Dropping it does not wait.
class Pending {
 public:
  Pending() = default;
  explicit Pending(OperationPtr operation) : operation_(std::move(operation)) {}
  bool valid() const { return operation_ != nullptr; }
  bool ready() const { return operation_ == nullptr || operation_->ready(); }
  /// Works for at most `limit`; returns true when done. Errors: TransportError.
  bool advance(std::chrono::milliseconds limit);
  /// The same, but a lost peer shows only as late: Group::wait reports the cause.
  bool wait_for(std::chrono::milliseconds limit);

 private:
  friend class Group;
  void note_end();

  OperationPtr operation_;
  trace::FlightLog::Ticket ticket_ = 0;
  std::shared_ptr<trace::Recorder> recorder_;  // null: nobody listens
  const char* kind_ = "";
  std::string channel_;
  int ranks_ = 1;
  int64_t bytes_ = 0;
  int64_t begin_ns_ = 0;
};

class Group;

/// A wait that its caller leaves and takes up again, to do something else between. `pending` outlives it.
class Wait {
 public:
  /// `peer`: whose part alone is waited for; none: every rank of the team has one.
  Wait(Group& group, Pending& pending, Site site, std::optional<int> peer = {});
  /// Works for at most about `limit`; returns whether the operation is done. Errors: as Group::wait, by the time since
  /// the wait was made.
  bool go_on(std::chrono::milliseconds limit);

 private:
  using Clock = std::chrono::steady_clock;
  void look_at_board(Clock::time_point now);

  Group& group_;
  Pending& pending_;
  const Site site_;
  const std::optional<int> peer_;  // its index in the team
  const Clock::time_point begin_;
  const std::chrono::milliseconds period_;  // between looks at the board: its store is remote
  Clock::time_point look_;
  std::optional<Clock::time_point> reported_;
};

/// How long the calling thread has waited for other ranks so far, in any group. Units: seconds.
double waited_by_this_thread();

/// The objects that the channels of one engine share.
struct ChannelOptions {
  std::chrono::milliseconds timeout;
  std::shared_ptr<world::FailureBoard> board;  // where ranks report and look for failures
  std::shared_ptr<host::Host> host;            // the team's host; null: all traffic uses c10d
  std::shared_ptr<const Clock> clock;          // null: errors report step 0
  bool on_device = false;                      // carries tensors of the model's device, not the CPU's
  PeerTraffic peers = PeerTraffic::no;
  std::shared_ptr<trace::Recorder> recorder;  // where waits and collectives are reported; null: nowhere
  std::shared_ptr<LinkTimes> links;           // counts what CPUs exchange over the network; null: nobody counts
};

/// One channel of collectives over a team. All ranks make calls in the same order, from one thread per rank at a time.
/// Operations progress in `wait` and `wait_for`, and end in the order in which they began. Channels do not wait on each
/// other: gathers, reductions and control messages have one each. Ranks are indices in the team; errors and logs use
/// world ranks.
class Group {
 public:
  /// Collective over the team. `name` ends in the channel: "1/gathers".
  /// Errors: CommError when the ranks do not all arrive within the timeout.
  Group(const World& world, Team team, const std::string& name, ChannelOptions options);
  ~Group();

  const Team& team() const { return team_; }
  int index() const { return team_.index(); }
  int size() const { return team_.size(); }
  /// A rank of the world as errors name it: with its coordinates where there is more than the data axis.
  std::string name_of(int rank) const;
  /// The transport's name; "none" in a team of one.
  const char* path() const { return transport_->name(); }
  /// Whether what was started ends though no rank waits for it.
  bool advances_alone() const { return transport_->advances_alone(); }
  /// Bytes that this rank has sent to the others so far, whatever the transport.
  int64_t sent_bytes() const { return sent_bytes_; }
  /// Records the engine's time; null: nothing does.
  trace::Recorder* recorder() const { return options_.recorder.get(); }
  /// For a channel that is older than its engine, or outlives it. Between collectives.
  void report_to(std::shared_ptr<trace::Recorder> recorder) { options_.recorder = std::move(recorder); }
  /// The engine's step, for logs.
  int64_t step() const { return options_.clock ? options_.clock->step() : 0; }

  /// Shapes: input (N,), output (W * N,), contiguous, equal type and device. N may be 0, for all methods.
  Pending all_gather(at::Tensor output, at::Tensor input, OwnRow own = OwnRow::copied);
  /// Sends row r of the input to rank r; output row r is rank r's. Shapes: (W * N,) both.
  Pending all_to_all(at::Tensor output, at::Tensor input, OwnRow own = OwnRow::copied);
  /// Sums in an order that the transport chooses. Shapes: input (W * N,), output (N,).
  Pending reduce_scatter(at::Tensor output, at::Tensor input);
  Pending broadcast(at::Tensor tensor, int root);
  /// Sends one contiguous tensor to index `to`, which receives an equal type and shape. Any number may be under way, in
  /// both directions. Needs PeerTraffic::yes.
  Pending send(at::Tensor tensor, int to);
  Pending receive(at::Tensor tensor, int from);
  /// Logs in this channel a reduction that was started elsewhere. All ranks call it in the same order. `sent`: of its
  /// bytes, those that this rank sends; absent: all but a rank's part.
  Pending track(OperationPtr under_way, const char* operation, int64_t bytes, std::optional<int64_t> sent = {});
  /// Returns Transport::rail. Its traffic is not logged.
  Transport* rail() { return transport_->rail(); }
  /// Returns when all ranks have arrived. Errors: as `wait`.
  void barrier(const Site& site);

  /// Errors: CommError, at once if a peer has reported a failure, soon if it has raised an error and does not go on,
  /// else after the timeout; names the missing ranks. What the handler of a signal throws.
  /// `meanwhile`, if any, is called at once and then every few milliseconds.
  void wait(Pending& pending, const Site& site, const std::function<void()>& meanwhile = {});
  /// Makes work issued to `lane` later run after the collective. The host waits, as `wait` does, only where the
  /// transport needs it: on a CPU. Errors: as `wait`.
  void order_before(const device::Lane& lane, Pending& pending, const Site& site,
                    const std::function<void()>& meanwhile = {});
  /// Waits at most `limit`; returns true when done. Never throws because of lateness.
  bool wait_for(Pending& pending, std::chrono::milliseconds limit, const Site& site);

 private:
  friend class Wait;
  Pending logged(OperationPtr under_way, const char* operation, int64_t bytes, int64_t sent);
  /// Works for at most `limit` and ends `pending` when it is done. Errors: as `wait`.
  bool advance(Pending& pending, std::chrono::milliseconds limit, const Site& site);
  /// Names a rank of this machine that was killed, and an error that stands: it may be that rank's.
  std::optional<std::string> find_killed() const;
  std::optional<int> find_process(int rank) const;
  /// Why this rank's wait ends, as other ranks report it, or have `reported`; the board notes it.
  std::string find_cause(const Site& site, std::optional<std::string> reported = {}) const;
  [[noreturn]] void time_out(const Site& site) const;
  std::string text(const Site& site) const;
  std::string rank_name() const { return name_of(team_.rank()); }

  Team team_;
  ChannelOptions options_;
  std::string channel_;  // "gathers"
  std::unique_ptr<Transport> transport_;
  at::Tensor token_, tokens_;  // what a barrier gathers
  uint64_t sequence_ = 0;      // number of operations started
  int64_t sent_bytes_ = 0;
};

}  // namespace deeptide::comm
