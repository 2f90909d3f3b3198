// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Threads that a program can do without.
#pragma once

#include <system_error>
#include <thread>
#include <utility>

namespace deeptide {

/// A thread that runs `work`; one that is not joinable where the system has no more threads to give.
template <typename Work>
std::thread start_thread(Work&& work) {
  try {
    return std::thread(std::forward<Work>(work));
  } catch (const std::system_error&) {
    return {};
  }
}

}  // namespace deeptide
