// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Waits and failures beneath an interpreter: what a language binding installed, and its defaults.
#pragma once

#include <functional>
#include <string>

namespace deeptide::comm {

/// Runs `wait` inside the region that set_blocking_region installed, with the interpreter's lock released. Use it for
/// a mutex that is held while waiting for peers, too: a thread that waited for that mutex with the interpreter's lock
/// held would keep the mutex's owner from finishing.
void run_blocking(const std::function<void()>& wait);

/// Throws a CommError, as the error of the language that set_error_thrower knows.
[[noreturn]] void throw_comm_error(const std::string& text);

}  // namespace deeptide::comm
