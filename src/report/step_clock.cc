// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sorts spans into the fields of StepTimes.
#include "report/step_clock.h"

#include <utility>

namespace deeptide::report {

using trace::Phase;
using trace::SpanRecord;
using trace::Work;

void StepClock::begin(const SpanRecord& span) noexcept {
  if (span.work == Work::optimizer) before_optimizer_ = times_.waiting + times_.files;
}

void StepClock::end(const SpanRecord& span) noexcept {
  if (!span.in_turn) return;
  const auto seconds = static_cast<float>(static_cast<double>(span.end_ns - span.begin_ns) * 1e-9);
  if (span.work == Work::wait || span.work == Work::file) {
    if (span.phase == Phase::outside) return;
    StepTimes& times = span.phase == Phase::between ? between_ : times_;
    (span.work == Work::wait ? times.waiting : times.files) += seconds;
    if (span.work == Work::wait && span.phase == Phase::backward) times.backward_waiting += seconds;
  } else if (span.work == Work::optimizer) {
    const double within = times_.waiting + times_.files - before_optimizer_;
    times_.optimizer += seconds - static_cast<float>(within);
  } else if (span.work == Work::phase && span.phase != Phase::outside) {
    times_.total += seconds;
    float* const fields[] = {&times_.between, &times_.forward, &times_.backward, &times_.step};
    *fields[static_cast<size_t>(span.phase)] += seconds;
    if (span.phase == Phase::forward) {  // that nobody announced
      times_.waiting += between_.waiting;
      times_.files += between_.files;
    }
    between_ = {};
  }
}

StepTimes StepClock::take() { return std::exchange(times_, {}); }

}  // namespace deeptide::report
