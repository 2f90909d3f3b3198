// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Opens a port to which this job's processes on other hosts connect back.
#pragma once

namespace deeptide::launch {

/// Returns a non-blocking socket that listens at a free port on all addresses, and sets `port`.
/// Errors: std::system_error.
int open_listener(int& port);

}  // namespace deeptide::launch
