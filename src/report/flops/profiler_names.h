// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Shows what the engine waits for and steps to torch.profiler, under the timeline's names.
#pragma once

#include <ATen/record_function.h>

#include <memory>
#include <utility>
#include <vector>

#include "trace/recorder.h"

namespace deeptide::report {

/// Makes each span a record_function while a profiler is at work. Not phases and units, which may last longer than the
/// profiler: torch would write into what it has freed. The engine's methods are ranges of their own.
class ProfilerNames : public trace::Sink {
 public:
  /// Whether torch.profiler records what this thread does.
  static bool is_wanted();

  void begin(const trace::SpanRecord& span) noexcept override;
  void end(const trace::SpanRecord& span) noexcept override;

 private:
  std::vector<std::pair<uint32_t, std::unique_ptr<at::RecordFunction>>> open_;  // by thread, outermost first
};

}  // namespace deeptide::report
