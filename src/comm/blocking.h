// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Where a thread may stand still: with no interpreter's lock in its hands.
#pragma once

#include <functional>

namespace deeptide::comm {

/// Runs `wait` inside the region that set_blocking_region installed. Around a mutex that is held while waiting for
/// peers, too: who waits for that mutex with the interpreter's lock would keep its holder from coming back.
void run_blocking(const std::function<void()>& wait);

}  // namespace deeptide::comm
