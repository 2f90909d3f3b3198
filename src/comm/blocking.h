// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Waits and failures beneath an interpreter: the functions that a language binding installed, and their defaults.
#pragma once

#include <functional>
#include <string>

namespace deeptide::comm {

/// Runs `wait` inside the region that set_blocking_region installed, with the interpreter's lock released. Use it also
/// for a mutex whose owner waits for peers: a thread that waits for that mutex with the interpreter's lock held would
/// keep the owner from finishing.
void run_blocking(const std::function<void()>& wait);

/// Throws a CommError as the error type that set_error_thrower installed.
[[noreturn]] void throw_comm_error(const std::string& text);

}  // namespace deeptide::comm
