// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Holds a RecordFunction for each span under way; they nest, within a thread.
#include "report/flops/profiler_names.h"

#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <string>

namespace deeptide::report {

using trace::SpanRecord;
using trace::Work;

namespace {

bool is_shown(const SpanRecord& span) {
  return span.work == Work::wait || span.work == Work::file || span.work == Work::optimizer;
}

}  // namespace

bool ProfilerNames::is_wanted() { return torch::profiler::impl::profilerEnabled(); }

void ProfilerNames::begin(const SpanRecord& span) noexcept {
  if (!is_shown(span)) return;
  auto function = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  if (function->isActive()) function->before("deeptide::" + std::string(span.name));
  open_.emplace_back(span.thread, std::move(function));
}

void ProfilerNames::end(const SpanRecord& span) noexcept {
  if (!is_shown(span)) return;
  const auto newest =
      std::find_if(open_.rbegin(), open_.rend(), [&](const auto& open) { return open.first == span.thread; });
  if (newest != open_.rend()) open_.erase(std::next(newest).base());
}

}  // namespace deeptide::report
