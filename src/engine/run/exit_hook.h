// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finishes what a call of std::exit would lose.
#pragma once

#include <sys/types.h>

#include <functional>
#include <thread>

namespace deeptide::engine {

/// While it lives, `finish` runs when the thread that made it calls std::exit, which destroys nothing on any stack. A
/// forked child runs none. Beneath an interpreter nothing runs: that one is gone by then, and has ended its engines.
class ExitHook {
 public:
  explicit ExitHook(std::function<void()> finish);
  ~ExitHook();
  ExitHook(const ExitHook&) = delete;

 private:
  static void run_all();
  static std::function<void()> take_next();

  std::function<void()> finish_;
  const std::thread::id thread_ = std::this_thread::get_id();
  const pid_t process_;
};

}  // namespace deeptide::engine
