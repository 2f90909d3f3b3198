// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Registers one handler with the C library, which runs the hooks of the thread that exits.
#include "engine/run/exit_hook.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include "base/interrupt.h"

namespace deeptide::engine {
namespace {

std::mutex g_mutex;

std::vector<ExitHook*>& hooks() {
  static std::vector<ExitHook*> all;
  return all;
}

}  // namespace

ExitHook::ExitHook(std::function<void()> finish) : finish_(std::move(finish)), process_(::getpid()) {
  if (has_interpreter()) return;
  const std::lock_guard lock(g_mutex);
  hooks().push_back(this);
  static const int registered = std::atexit(&ExitHook::run_all);  // after `hooks`, which so outlives it
  static_cast<void>(registered);
}

ExitHook::~ExitHook() {
  const std::lock_guard lock(g_mutex);
  std::erase(hooks(), this);
}

/// Empty: this thread has no more. The hook itself may go while its work runs.
std::function<void()> ExitHook::take_next() {
  const std::lock_guard lock(g_mutex);
  const auto next = std::find_if(hooks().begin(), hooks().end(), [](const ExitHook* hook) {
    return hook->thread_ == std::this_thread::get_id() && hook->process_ == ::getpid();
  });
  if (next == hooks().end()) return {};
  auto finish = std::move((*next)->finish_);
  hooks().erase(next);
  return finish;
}

void ExitHook::run_all() {
  while (const auto finish = take_next()) finish();
}

}  // namespace deeptide::engine
