// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Asks the system for memory, addresses and threads where it may have none to give.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

namespace deeptide {

/// Gives the system the memory and the addresses that this process keeps idle; returns whether there were any. Null:
/// nothing is kept.
inline std::atomic<bool (*)()> give_memory_back = nullptr;

/// Calls `take`, which returns whether the system gave what it was asked for: as things are, then without what lies
/// idle. Returns what the last call returned.
template <typename Take>
bool take_or_give_back(const Take& take) {
  if (take()) return true;
  const auto give_back = give_memory_back.load();
  return give_back != nullptr && give_back() && take();
}

/// A thread that runs `work`. Errors: std::system_error where the system has no more threads to give.
template <typename Work>
std::thread start_thread_or_throw(Work&& work) {
  const auto kept = std::make_shared<std::decay_t<Work>>(std::forward<Work>(work));  // for a second attempt
  std::thread thread;
  std::exception_ptr refused;
  const auto start = [&] {
    try {
      thread = std::thread([kept] { (*kept)(); });
      return true;
    } catch (const std::system_error&) {  // its stack, for one, may have found no addresses
      refused = std::current_exception();
      return false;
    }
  };
  if (!take_or_give_back(start)) std::rethrow_exception(refused);
  return thread;
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
