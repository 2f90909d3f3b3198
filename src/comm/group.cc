// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One transport a channel; the only place that waits on peers.
#include "comm/group.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/blocking.h"
#include "host/host.h"
#include "world/failure_board.h"

namespace deeptide::comm {

using at::Tensor;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

// The transport gives up after us: our error says more.
constexpr milliseconds kTransportGrace{2000};

/// All ranks are on this host: no name needs to be resolved.
bool is_local(const World& world) {
  const char* address = std::getenv("MASTER_ADDR");
  return world.source == "threads" ||
         (address && (!std::strcmp(address, "127.0.0.1") || !std::strcmp(address, "localhost")));
}

c10::intrusive_ptr<c10d::Backend> make_gloo(const World& world, const std::string& name, int rank, int size,
                                            milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout + kTransportGrace);
  using Gloo = c10d::ProcessGroupGloo;
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  options->devices.push_back(interface         ? Gloo::createDeviceForInterface(interface)
                             : is_local(world) ? Gloo::createDeviceForHostname("127.0.0.1")
                                               : Gloo::createDefaultDevice());
  options->threads = 1;  // one channel's collectives run in order anyway; fewer threads leave the cores to compute
  auto store = c10::make_intrusive<c10d::PrefixStore>("deeptide/" + name, world.store);
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
}

/// What every transport takes for granted: they move bytes.
void check(const Tensor& one, int64_t factor, const Tensor& other) {
  TORCH_INTERNAL_ASSERT(one.is_contiguous() && other.is_contiguous(), "collectives take contiguous tensors");
  TORCH_INTERNAL_ASSERT(one.numel() * factor == other.numel() && one.scalar_type() == other.scalar_type() &&
                            one.device() == other.device(),
                        "a collective of ", one.toString(), one.sizes(), " and ", other.toString(), other.sizes(),
                        ": expected ", factor, " times as many elements in the second");
}

std::unique_ptr<Transport> make_transport(const World& world, const std::string& name, milliseconds timeout,
                                          bool on_device, const std::shared_ptr<host::Host>& host) {
  if (on_device && world.backend) return make_c10d_transport(world.backend);
  if (host && host->holds_all()) return make_host_transport(host);
  if (host && host->size() > 1 && host->is_uniform()) {
    const std::string rail = name + "/rail/" + std::to_string(host->index());
    return make_two_level_transport(
        host, make_gloo(world, rail, host->host_index(), static_cast<int>(host->hosts().size()), timeout));
  }
  return make_c10d_transport(make_gloo(world, name, world.rank, world.size, timeout));
}

// "1/gathers" -> "gathers", of a process's second engine "gathers 2": each counts for itself.
std::string channel_of(const std::string& name) {
  const size_t slash = name.rfind('/');
  if (slash == std::string::npos) return name;
  const std::string owner = name.substr(0, slash);
  return name.substr(slash + 1) + (owner == "1" ? "" : " " + owner);
}

}  // namespace

std::string Site::text() const { return "step " + std::to_string(step) + ", " + phase + ", " + what; }

bool Pending::wait_for(milliseconds limit) {
  if (operation_ == nullptr) return true;
  try {
    if (!operation_->advance(limit)) return false;
  } catch (const TransportError&) {
    std::this_thread::sleep_for(limit);
    return false;
  }
  operation_.reset();
  trace::flight_log().end(ticket_);
  return true;
}

Group::Group(const World& world, const std::string& name, milliseconds timeout,
             std::shared_ptr<world::FailureBoard> board, bool on_device, const std::shared_ptr<host::Host>& host)
    : rank_(world.rank), size_(world.size), timeout_(timeout), board_(std::move(board)), channel_(channel_of(name)) {
  if (size_ == 1) return;
  token_ = at::zeros({1}, at::kByte);
  tokens_ = at::zeros({size_}, at::kByte);
  try {
    run_blocking([&] { transport_ = make_transport(world, name, timeout, on_device, host); });
  } catch (const std::exception& error) {
    throw CommError("rank " + std::to_string(rank_) + " of " + std::to_string(size_) + " could not connect group '" +
                    name + "' within " + std::to_string(timeout.count()) + " ms: " + error.what() +
                    ". Check that all ranks run and reach each other (GLOO_SOCKET_IFNAME picks the interface).");
  }
}

Group::~Group() = default;

Pending Group::track(OperationPtr under_way, const char* operation, int64_t bytes) {
  Pending pending(std::move(under_way));
  trace::Flight flight;
  flight.operation = operation;
  flight.channel = channel_;
  flight.bytes = bytes;
  flight.sequence = ++sequence_;
  flight.rank = rank_;
  pending.ticket_ = trace::flight_log().begin(flight);
  return pending;
}

Pending Group::all_gather(Tensor output, Tensor input) {
  check(input, size_, output);
  if (transport_) {
    const auto bytes = static_cast<int64_t>(output.nbytes());
    return track(transport_->all_gather(std::move(output), std::move(input)), "all-gather", bytes);
  }
  if (output.data_ptr() != input.data_ptr()) output.copy_(input);
  return {};
}

Pending Group::all_to_all(Tensor output, Tensor input) {
  check(input, 1, output);
  TORCH_INTERNAL_ASSERT(input.numel() % size_ == 0, "all_to_all of ", input.numel(), " elements among ", size_,
                        " ranks");
  if (transport_) {
    const auto bytes = static_cast<int64_t>(input.nbytes());
    return track(transport_->all_to_all(std::move(output), std::move(input)), "all-to-all", bytes);
  }
  output.copy_(input);
  return {};
}

Pending Group::reduce_scatter(Tensor output, Tensor input) {
  check(output, size_, input);
  if (transport_) {
    const auto bytes = static_cast<int64_t>(input.nbytes());
    return track(transport_->reduce_scatter(std::move(output), std::move(input)), "reduce-scatter", bytes);
  }
  output.copy_(input);
  return {};
}

Pending Group::broadcast(Tensor tensor, int root) {
  check(tensor, 1, tensor);
  if (!transport_) return {};
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  return track(transport_->broadcast(std::move(tensor), root), "broadcast", bytes);
}

void Group::barrier(const Site& site) {
  if (size_ == 1) return;
  auto pending = all_gather(tokens_, token_);
  wait(pending, site);
}

bool Group::wait_for(Pending& pending, milliseconds limit, const Site& site) {
  if (!pending.valid()) return true;
  trace::flight_log().waiting(pending.ticket_, site.step, site.phase, site.what);
  std::string failure;
  bool done = false;
  run_blocking([&] {
    try {
      done = pending.operation_->advance(limit);
    } catch (const TransportError& error) {
      failure = error.what();
    }
  });
  if (done || !failure.empty()) trace::flight_log().end(pending.ticket_);
  if (!failure.empty()) {
    const std::string place = "waits: " + site.text();
    const auto reported = board_->failure();  // a diagnosis takes a moment and a word to the store: only without it
    throw_comm_error("rank " + std::to_string(rank_) + " lost its peers at " + site.text() + ": " +
                     (reported ? *reported : board_->diagnose(place)) + ". Transport: " + failure);
  }
  if (done) pending = Pending();
  return done;
}

void Group::wait(Pending& pending, const Site& site) {
  const auto begin = steady_clock::now();
  while (!wait_for(pending, std::min(world::kPollFailures, timeout_), site)) {
    if (const auto failure = board_->failure()) {
      // A peer that ended after its part may have been heard of before its part has arrived.
      if (wait_for(pending, world::kPollFailures, site)) return;
      throw_comm_error("rank " + std::to_string(rank_) + " stopped at " + site.text() + ": " + *failure);
    }
    if (steady_clock::now() - begin > timeout_) {
      throw_comm_error("rank " + std::to_string(rank_) + " timed out after " +
                       std::to_string(timeout_.count() / 1000.0) + " s at " + site.text() + ": " +
                       board_->diagnose("waits: " + site.text()) +
                       ". The limit is \"deeptide\": {\"comm_timeout\": seconds}.");
    }
  }
}

}  // namespace deeptide::comm
