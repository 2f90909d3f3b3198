// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// c10d backends behind one interface; the only place that waits on peers.
#include "comm/group.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/blocking.h"
#include "comm/failure_board.h"
#include "deeptide/interpreter.h"

namespace deeptide::comm {

using at::Tensor;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr milliseconds kPollFailures{250};
// The transport gives up after us: our error says more.
constexpr milliseconds kTransportGrace{2000};

BlockingRegion& blocking_region() {
  static BlockingRegion region;
  return region;
}

ErrorThrower& error_thrower() {
  static ErrorThrower thrower;
  return thrower;
}

[[noreturn]] void fail(const std::string& text) {
  const CommError error(text);
  if (error_thrower()) error_thrower()(error);
  throw error;
}

/// All ranks are on this host: no name needs to be resolved.
bool is_local(const World& world) {
  const char* address = std::getenv("MASTER_ADDR");
  return world.source == "threads" ||
         (address && (!std::strcmp(address, "127.0.0.1") || !std::strcmp(address, "localhost")));
}

c10::intrusive_ptr<c10d::Backend> make_gloo(const World& world, const std::string& name, milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout + kTransportGrace);
  using Gloo = c10d::ProcessGroupGloo;
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  options->devices.push_back(interface         ? Gloo::createDeviceForInterface(interface)
                             : is_local(world) ? Gloo::createDeviceForHostname("127.0.0.1")
                                               : Gloo::createDefaultDevice());
  options->threads = 1;  // one channel's collectives run in order anyway; fewer threads leave the cores to compute
  auto store = c10::make_intrusive<c10d::PrefixStore>("deeptide/" + name, world.store);
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, world.rank, world.size, options);
}

}  // namespace

std::string Site::text() const { return "step " + std::to_string(step) + ", " + phase + ", " + what; }

void run_blocking(const std::function<void()>& wait) {
  if (blocking_region()) {
    blocking_region()(wait);
  } else {
    wait();
  }
}

bool Pending::ready() const { return work_ == nullptr || work_->isCompleted(); }

Group::Group(const World& world, const std::string& name, milliseconds timeout, std::shared_ptr<FailureBoard> board,
             bool on_device)
    : rank_(world.rank),
      size_(world.size),
      timeout_(timeout),
      board_(std::move(board)),
      on_device_(on_device && world.backend) {
  if (size_ == 1) return;
  try {
    run_blocking([&] { backend_ = on_device_ ? world.backend : make_gloo(world, name, timeout); });
  } catch (const std::exception& error) {
    throw CommError("rank " + std::to_string(rank_) + " of " + std::to_string(size_) + " could not connect group '" +
                    name + "' within " + std::to_string(timeout.count()) + " ms: " + error.what() +
                    ". Check that all ranks run and reach each other (GLOO_SOCKET_IFNAME picks the interface).");
  }
}

Group::~Group() = default;

Pending Group::start(c10::intrusive_ptr<c10d::Work> work, std::vector<Tensor> tensors) {
  Pending pending;
  pending.work_ = std::move(work);
  pending.tensors_ = std::move(tensors);
  return pending;
}

Pending Group::all_gather(Tensor output, Tensor input) {
  if (size_ == 1) {
    if (output.data_ptr() != input.data_ptr()) output.copy_(input);
    return {};
  }
  return start(backend_->_allgather_base(output, input), {output, input});
}

Pending Group::all_to_all(Tensor output, Tensor input) {
  if (size_ == 1) {
    output.copy_(input);
    return {};
  }
  std::vector<int64_t> equal_splits;
  return start(backend_->alltoall_base(output, input, equal_splits, equal_splits), {output, input});
}

Pending Group::reduce_scatter(Tensor output, Tensor input) {
  if (size_ == 1) {
    output.copy_(input);
    return {};
  }
  return start(backend_->_reduce_scatter_base(output, input), {output, input});
}

Pending Group::broadcast(Tensor tensor, int root) {
  if (size_ == 1) return {};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<Tensor> tensors{tensor};
  return start(backend_->broadcast(tensors, options), {tensor});
}

bool Group::wait_for(Pending& pending, milliseconds limit, const Site& site) {
  if (!pending.valid()) return true;
  std::string failure;
  bool done = false;
  run_blocking([&] {
    try {
      if (on_device_) {
        pending.work_->wait();  // orders the current stream after the collective
      } else {
        pending.work_->wait(std::max(limit, milliseconds(1)));
      }
      done = true;
    } catch (const std::exception& error) {
      if (!pending.work_->isCompleted()) return;  // only late
      // It may have ended well just after the limit: then the error is the limit's, not the work's.
      done = pending.work_->exception() == nullptr;
      if (!done) failure = error.what();
    }
  });
  if (!failure.empty()) {
    const std::string place = "waits: " + site.text();
    fail("rank " + std::to_string(rank_) + " lost its peers at " + site.text() + ": " +
         board_->failure().value_or(board_->diagnose(place)) + ". Transport: " + failure.substr(0, 300));
  }
  if (done) pending = Pending();
  return done;
}

void Group::wait(Pending& pending, const Site& site) {
  const auto begin = steady_clock::now();
  while (!wait_for(pending, std::min(kPollFailures, timeout_), site)) {
    if (const auto failure = board_->failure()) {
      // A peer that ended after its part may have been heard of before its part has arrived.
      if (wait_for(pending, kPollFailures, site)) return;
      fail("rank " + std::to_string(rank_) + " stopped at " + site.text() + ": " + *failure);
    }
    if (steady_clock::now() - begin > timeout_) {
      fail("rank " + std::to_string(rank_) + " timed out after " + std::to_string(timeout_.count() / 1000.0) +
           " s at " + site.text() + ": " + board_->diagnose("waits: " + site.text()) +
           ". The limit is \"deeptide\": {\"comm_timeout\": seconds}.");
    }
  }
}

}  // namespace deeptide::comm

namespace deeptide {

void set_blocking_region(BlockingRegion region) { comm::blocking_region() = std::move(region); }
void set_error_thrower(ErrorThrower thrower) { comm::error_thrower() = std::move(thrower); }

}  // namespace deeptide
