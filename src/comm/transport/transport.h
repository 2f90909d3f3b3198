// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How a channel moves bytes between ranks: over c10d, through shared memory, or host by host with both.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/transport/link_times.h"
#include "host/operation.h"

namespace deeptide::host {
class Host;
}

namespace deeptide::comm {

using host::Operation;
using host::OperationPtr;
using host::TransportError;

/// Whether an exchange copies what a rank keeps from its input to its output, too. `left`: those elements of the output
/// hold anything afterwards, and the caller uses the input's.
enum class OwnRow : uint8_t { copied, left };

/// Shapes and meaning: as in Group. All ranks make calls in the same order; operations of one transport end in the
/// order in which they were started.
class Transport {
 public:
  virtual ~Transport() = default;
  /// "c10d", "shared memory", "two levels".
  virtual const char* name() const = 0;
  /// Whether operations end without a call of `advance`, on any rank.
  virtual bool advances_alone() const { return false; }
  /// Whether bytes travel over a network, where they may be under way for long after their sender has ended.
  virtual bool crosses_hosts() const { return true; }
  /// `own`: an offer, which a transport may ignore; likewise below.
  virtual OperationPtr all_gather(at::Tensor output, at::Tensor input, OwnRow own) = 0;
  virtual OperationPtr all_to_all(at::Tensor output, at::Tensor input, OwnRow own) = 0;
  virtual OperationPtr reduce_scatter(at::Tensor output, at::Tensor input) = 0;
  virtual OperationPtr broadcast(at::Tensor tensor, int root) = 0;
  /// Sends one contiguous tensor of any type to index `to`, which receives as many bytes. Transfers between two ranks
  /// in one direction end in the order in which they were started; those of other ranks and of the other direction do
  /// not wait for them. None has a thread of its own, and empty ones do not travel. Needs PeerTraffic::yes.
  virtual OperationPtr send(at::Tensor tensor, int to) = 0;
  virtual OperationPtr receive(at::Tensor tensor, int from) = 0;
  /// The transport between hosts for ranks of this rank's index, in the order of hosts; null if there is one level.
  virtual Transport* rail() { return nullptr; }
};

/// Whether a channel carries send and receive besides collectives: they cost shared memory per pair of ranks.
enum class PeerTraffic : uint8_t { no, yes };

/// For a team of one rank: collectives are copies.
std::unique_ptr<Transport> make_loopback_transport();

/// A backend, and where its traffic between CPUs is counted.
struct Network {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::vector<int> ranks;            // of the world, by the backend's rank
  int num_devices = 1;               // Gloo's: a transfer with tag t takes device t % num_devices
  std::shared_ptr<LinkTimes> links;  // null: nobody counts
};

std::unique_ptr<Transport> make_c10d_transport(Network network);

/// Uses slots in shared memory; all ranks are on one host. Errors (on use): a rank's process has ended.
std::unique_ptr<Transport> make_host_transport(std::shared_ptr<host::Host> host, PeerTraffic peers = PeerTraffic::no);

/// `rail`: c10d among the ranks of this rank's index on every host, in the order of hosts; shared memory serves each
/// host. A byte crosses between hosts as often as over c10d alone, and never within one. `peers`: c10d among all ranks,
/// for sends to other hosts; absent: no send or receive. Needs host::Host::is_uniform().
std::unique_ptr<Transport> make_two_level_transport(std::shared_ptr<host::Host> host, Network rail,
                                                    std::optional<Network> peers = {});

}  // namespace deeptide::comm
