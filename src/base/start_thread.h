// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Starts threads where the system may have none to give.
#pragma once

#include <stdexcept>
#include <string>
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

/// A thread that the program cannot do without. Start it early: a limit that is lowered later then does no harm.
/// `purpose`: "exchanges between ranks". Errors: std::runtime_error that names the limits.
template <typename Work>
std::thread start_needed_thread(const char* purpose, Work&& work) {
  try {
    return std::thread(std::forward<Work>(work));
  } catch (const std::system_error& error) {
    throw std::runtime_error("the system has no thread to give for " + std::string(purpose) + " (" + error.what() +
                             "): raise the limit of processes (ulimit -u, a container's pids limit) or of address "
                             "space (ulimit -v)");
  }
}

}  // namespace deeptide
