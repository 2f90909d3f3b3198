// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The rates of steps and samples between two printed lines.
#pragma once

#include <chrono>
#include <cstdint>

namespace deeptide::report {

/// Counts steps on the clock. The first step is in no rate: it also prepares.
class StepRate {
 public:
  using Clock = std::chrono::steady_clock;
  struct Rates {
    double steps_per_s = 0.0, samples_per_s = 0.0;  // 0: no step has passed
  };

  /// `samples`: since the run began.
  void end_step(int64_t samples, Clock::time_point now = Clock::now()) {
    if (steps_++ < 0) begin(samples, now);
    end_samples_ = samples;
  }

  /// The rates since the last call, or since the first step's end. Begins anew.
  Rates take(Clock::time_point now = Clock::now()) {
    const double seconds = std::chrono::duration<double>(now - begin_).count();
    if (steps_ <= 0 || seconds <= 0.0) return {};
    const Rates rates{static_cast<double>(steps_) / seconds,
                      static_cast<double>(end_samples_ - begin_samples_) / seconds};
    begin(end_samples_, now);
    return rates;
  }

 private:
  void begin(int64_t samples, Clock::time_point now) {
    begin_ = now;
    begin_samples_ = samples;
    steps_ = 0;
  }

  Clock::time_point begin_;
  int64_t begin_samples_ = 0, end_samples_ = 0;
  int64_t steps_ = -1;  // since begin_; -1: the first step has not ended
};

}  // namespace deeptide::report
