// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tells the attempts of a job apart where one store serves them all: torchrun's agent keeps its store when it starts
// the ranks again, with every key that ranks of earlier attempts have left.
#pragma once

#include <chrono>
#include <string>

#include "deeptide/world.h"

namespace deeptide::world {

/// A name of this process that no other process has, also none of the same number later.
std::string process_name();

/// Collective. Returns the part of `store` that belongs to the ranks that are alive, empty when they arrive first.
/// TORCHELASTIC_RESTART_COUNT does not name an attempt: each host's agent counts for itself, and does not count a
/// restart that another host asked for. So rank 0 opens an attempt and waits until each rank has answered to that very
/// one. Ranks of one process may call it repeatedly. `process`: a name as process_name() has it.
/// Errors: ConfigError if another process has answered as this rank; CommError if ranks do not arrive within `timeout`.
c10::intrusive_ptr<c10d::Store> join_attempt(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                             std::chrono::milliseconds timeout,
                                             const std::string& process = process_name());

}  // namespace deeptide::world
