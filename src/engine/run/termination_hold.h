// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Puts off the end of a process that is asked to terminate while a save is under way.
#pragma once

namespace deeptide::engine {

/// While any of these lives, a first SIGTERM, which would end the process at once, waits for the last of them to go; a
/// second one does not wait. A program that handles the signal itself keeps its handler.
class TerminationHold {
 public:
  TerminationHold();
  ~TerminationHold();
  TerminationHold(const TerminationHold&) = delete;
};

}  // namespace deeptide::engine
