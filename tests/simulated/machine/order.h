// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The order checker: which accesses an event, a stream or the host puts after which others.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

#include "simulated/machine/memory.h"

namespace deeptide::simulated {

/// An access that nothing orders after an earlier one; names both.
struct OrderError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Bytes [begin, end) of a block that a task is to read or write.
struct Use {
  BlockRef block;
  size_t begin = 0, end = 0;
  bool write = false;
};

/// Raises each component of `clock` to that of `other`.
void join(Clock& clock, const Clock& other);
/// Whether `clock` knows the access to come before.
bool is_before(const Access& access, const Clock& clock);

/// Returns the text of the error if `use` by `task` of `stream`, which knows `now`, conflicts with an earlier access.
std::optional<std::string> conflict(const Use& use, const std::string& task, int stream, const Clock& now);
/// The same for the host, which knows `host` to be done. `who`: the code that accesses, for the error.
std::optional<std::string> host_conflict(const Use& use, const std::string& who, const Clock& host);
/// The same for giving back a block: of its own stream's later tasks, and of streams that it was recorded on, none
/// conflicts. `home`: what the block's own stream knows. `pending`: set if a recorded stream may still use it.
std::optional<std::string> free_conflict(const Block& block, const Clock& home, const Clock& host, bool& pending);

/// Remembers the access. What it covers is forgotten: all that overlaps came before, so it implies that.
void note(const Use& use, const std::string& task, int stream, uint64_t tick);
/// Forgets what the host knows to be done: it cannot conflict again.
void forget_done(Block& block, const Clock& host);

}  // namespace deeptide::simulated
