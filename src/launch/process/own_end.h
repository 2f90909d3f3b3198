// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Names the exit codes of ranks that were asked to end.
#pragma once

#include <optional>

#include "launch/process/process.h"

namespace deeptide::launch {

/// Ranks that end by one exit code of their own, other than success and a failure of any kind (1), have a message for
/// whoever asked them to end: "run me again". From 128 on a code tells of a signal: srun reports killed ranks so.
class OwnEnd {
 public:
  void add(const ExitStatus& status) {
    const bool speaks = status.signal == 0 && status.code > 1 && status.code < 128;
    if (!speaks || (code_ && *code_ != status.code)) differ_ = true;
    code_ = status.code;
  }
  /// Absent: ranks differ, or have none.
  std::optional<int> code() const { return differ_ ? std::nullopt : code_; }

 private:
  std::optional<int> code_;
  bool differ_ = false;
};

}  // namespace deeptide::launch
