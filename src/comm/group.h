// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Collectives with a timeout on every wait and errors that name ranks, step, phase and module.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>

#include "comm/transport.h"
#include "deeptide/world.h"
#include "trace/flight_log.h"

namespace deeptide::world {
class FailureBoard;
}  // namespace deeptide::world

namespace deeptide::world {
class FailureBoard;
}

namespace deeptide::comm {

/// Where in training a wait happens; written into every error.
struct Site {
  int64_t step = 0;
  const char* phase = "start";  // "forward", "backward", "step", "eval", "checkpoint", "start"
  std::string what;             // "gathering unit h.3 for h.3.attn.qkv.weight"
  std::string text() const;
};

/// A collective under way. Keeps its tensors alive. Movable; an unwaited one is waited for by nobody.
class Pending {
 public:
  Pending() = default;
  explicit Pending(OperationPtr operation) : operation_(std::move(operation)) {}
  bool valid() const { return operation_ != nullptr; }
  bool ready() const { return operation_ == nullptr || operation_->ready(); }
  /// True when done within `limit`. A lost peer is only late here: Group::wait says what is wrong.
  bool wait_for(std::chrono::milliseconds limit);

 private:
  friend class Group;
  OperationPtr operation_;
  trace::FlightLog::Ticket ticket_ = 0;
};

/// One channel of collectives over all ranks of a world. Calls must come in the same order on every rank, from one
/// thread of a rank at a time; operations go on in `wait` and `wait_for`, and end in the order in which they began.
/// Channels do not wait on each other: gathers, reductions and control messages have one each.
/// Ranks of one host talk through shared memory, as `host` says; without it all goes over c10d.
class Group {
 public:
  /// Collective. Errors: CommError when the ranks do not all arrive within `timeout`.
  Group(const World& world, const std::string& name, std::chrono::milliseconds timeout,
        std::shared_ptr<world::FailureBoard> board, bool on_device, const std::shared_ptr<host::Host>& host = nullptr);
  ~Group();

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Which way its bytes go, a Transport's name; "none" in a world of one.
  const char* path() const { return transport_ ? transport_->name() : "none"; }

  /// Shapes: input (N,), output (W * N,), contiguous, same type and device. N may be 0, for all methods.
  Pending all_gather(at::Tensor output, at::Tensor input);
  /// Row r of the input goes to rank r; row r of the output came from rank r. Shapes: (W * N,) both.
  Pending all_to_all(at::Tensor output, at::Tensor input);
  /// The transport's own sum, in an order of its choice. Shapes: input (W * N,), output (N,).
  Pending reduce_scatter(at::Tensor output, at::Tensor input);
  Pending broadcast(at::Tensor tensor, int root);
  /// Enters what was started elsewhere, in the same order on all ranks, into the log of this channel.
  Pending track(OperationPtr under_way, const char* operation, int64_t bytes);
  /// Returns when all ranks have come. Errors: as `wait`.
  void barrier(const Site& site);

  /// Errors: CommError, at once when a peer has reported a failure, else after the timeout; names the missing ranks.
  void wait(Pending& pending, const Site& site);
  /// Waits at most `limit`; true when done. Never throws for lateness.
  bool wait_for(Pending& pending, std::chrono::milliseconds limit, const Site& site);

 private:
  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<world::FailureBoard> board_;
  std::unique_ptr<Transport> transport_;  // null: a world of one
  std::string channel_;                   // "gathers"
  at::Tensor token_, tokens_;             // what a barrier gathers
  uint64_t sequence_ = 0;                 // of what was started
};

}  // namespace deeptide::comm
