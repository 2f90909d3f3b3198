// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A signal handler that only notes, and the words exchanged through the store.
#include "stop.h"

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace gpt {
namespace {

using std::chrono::steady_clock;

constexpr const char* kInterrupted = "interrupted";
constexpr const char* kTimeIsUp = "time is up";

volatile sig_atomic_t signal_came = 0;

void note_signal(int) { signal_came = 1; }

std::string key_of(int64_t step) { return "gpt/stop/" + std::to_string(step); }

}  // namespace

StopRequest::StopRequest(const deeptide::World& world, std::optional<double> minutes) : world_(world) {
  if (minutes) {
    const std::chrono::duration<double> limit(60.0 * *minutes);
    deadline_ = steady_clock::now() + std::chrono::duration_cast<steady_clock::duration>(limit);
  }
  struct sigaction action {};
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, &old_interrupt_);
  sigaction(SIGTERM, &action, &old_terminate_);
}

StopRequest::~StopRequest() {
  sigaction(SIGINT, &old_interrupt_, nullptr);
  sigaction(SIGTERM, &old_terminate_, nullptr);
}

void StopRequest::before_step(int64_t step) {
  if (signal_came) {
    reason_ = kInterrupted;
  } else if (deadline_ && steady_clock::now() > *deadline_) {
    reason_ = kTimeIsUp;
  }
  if (!reason_.empty()) world_.store->set(key_of(step), std::vector<uint8_t>(reason_.begin(), reason_.end()));
}

bool StopRequest::agreed(int64_t step) {
  if (!world_.store->check({key_of(step)})) return false;
  const auto said = world_.store->get(key_of(step));
  reason_.assign(said.begin(), said.end());
  return true;
}

bool StopRequest::interrupted() const { return reason_ == kInterrupted; }

}  // namespace gpt
