// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Starts threads where the system may have none to give.
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

namespace deeptide {

/// Called where a thread is refused, whose stack may have found no address space: gives memory back that lies idle, and
/// returns whether there was any. Null: nothing is kept.
inline std::atomic<bool (*)()> give_memory_back = nullptr;

/// A thread that runs `work`. Errors: std::system_error where the system has no more threads to give.
template <typename Work>
std::thread start_thread_or_throw(Work&& work) {
  const auto kept = std::make_shared<std::decay_t<Work>>(std::forward<Work>(work));  // for a second attempt
  const auto run = [kept] { (*kept)(); };
  try {
    return std::thread(run);
  } catch (const std::system_error&) {
    const auto give_back = give_memory_back.load();
    if (give_back == nullptr || !give_back()) throw;
  }
  return std::thread(run);
}

/// The same; one that is not joinable where the system has no more threads to give.
template <typename Work>
std::thread start_thread(Work&& work) {
  try {
    return start_thread_or_throw(std::forward<Work>(work));
  } catch (const std::system_error&) {
    return {};
  }
}

/// A thread that the program cannot do without. Start it early: a limit that is lowered later then does no harm.
/// `purpose`: "exchanges between ranks". Errors: std::runtime_error that names the limits.
template <typename Work>
std::thread start_needed_thread(const char* purpose, Work&& work) {
  try {
    return start_thread_or_throw(std::forward<Work>(work));
  } catch (const std::system_error& error) {
    throw std::runtime_error("the system has no thread to give for " + std::string(purpose) + " (" + error.what() +
                             "): raise the limit of processes (ulimit -u, a container's pids limit) or of address "
                             "space (ulimit -v)");
  }
}

}  // namespace deeptide
