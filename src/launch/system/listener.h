// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A port at which this job's processes on other hosts connect back.
#pragma once

namespace deeptide::launch {

/// A non-blocking socket that listens at a free port of all addresses; `port` becomes that. Errors: std::system_error.
int open_listener(int& port);

}  // namespace deeptide::launch
