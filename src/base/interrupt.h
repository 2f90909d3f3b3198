// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How waits notice the user's interrupt (^C), which an interpreter above us handles only when it is asked to.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "base/resources.h"

namespace deeptide {

/// The longest that a wait goes without `check_interrupts`.
inline constexpr std::chrono::milliseconds kInterruptPeriod{250};

/// Runs the handlers of signals that have arrived, as set_interrupt_check says; nothing without it. Errors: what a
/// handler throws, such as Python's KeyboardInterrupt.
void check_interrupts();

/// Whether a language binding has installed that check.
bool has_interpreter();

/// While it lives, this thread changes what all ranks must change alike: an error would leave some of it changed.
class Update {
 public:
  Update();
  ~Update();
  Update(const Update&) = delete;
};

/// Errors: std::runtime_error if this thread runs such a handler. The wait that it interrupted holds the engine's
/// locks, so `method`, which takes them, would wait for itself.
void refuse_in_interrupt_handler(const char* method);

/// Runs `work`, which blocks in foreign code, on a thread of its own, and calls `meanwhile` every kInterruptPeriod. If
/// `meanwhile` throws, so does this function, and leaves the thread behind: `work` must own all that it uses. A child
/// that forks meanwhile has no such thread, and must not go on from `meanwhile`.
template <typename Result>
Result run_beside(std::function<Result()> work, const std::function<void()>& meanwhile) {
  struct State {
    std::mutex mutex;
    std::condition_variable ended;
    std::optional<Result> result;
    std::exception_ptr error;
    bool done = false;
  };
  auto state = std::make_shared<State>();
  std::thread beside = start_thread([state, work]() mutable {
    try {
      Result result = work();
      const std::lock_guard lock(state->mutex);
      state->result = std::move(result);
    } catch (...) {
      const std::lock_guard lock(state->mutex);
      state->error = std::current_exception();
    }
    work = nullptr;  // what it owns goes before the caller continues
    const std::lock_guard lock(state->mutex);
    state->done = true;
    state->ended.notify_all();
  });
  if (!beside.joinable()) return work();  // nothing can be done meanwhile
  beside.detach();
  work = nullptr;
  std::unique_lock lock(state->mutex);
  while (!state->ended.wait_for(lock, kInterruptPeriod, [&] { return state->done; })) {
    lock.unlock();
    meanwhile();
    lock.lock();
  }
  if (state->error) std::rethrow_exception(state->error);
  return std::move(*state->result);
}

}  // namespace deeptide
