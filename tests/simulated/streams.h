// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Shared by tests of the simulated accelerator: streams in scopes, and every schedule.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <regex>
#include <string>

#include "simulated/operators/backend.h"

namespace deeptide::simulated {

inline c10::impl::VirtualGuardImpl guard() { return c10::impl::VirtualGuardImpl(kSimulated); }
inline c10::Stream new_stream() { return guard().getNewStream(simulated_device()); }
inline c10::Stream default_stream() { return guard().getDefaultStream(simulated_device()); }

/// While it lives, this thread's operators go to the stream.
class On {
 public:
  explicit On(c10::Stream stream) : before_(guard().exchangeStream(stream)) {}
  ~On() { guard().exchangeStream(before_); }
  On(const On&) = delete;
  On& operator=(const On&) = delete;

 private:
  c10::Stream before_;
};

inline c10::Event recorded(c10::Stream stream) {
  c10::Event event(kSimulated, c10::EventFlag::BACKEND_DEFAULT);  // which keeps times
  event.record(stream);
  return event;
}

inline at::Tensor empty_simulated(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype).device(simulated_device()));
}

/// Whether the text has a part that matches the regular expression.
inline bool has_match(const std::string& text, const std::string& pattern) {
  return std::regex_search(text, std::regex(pattern));
}

/// Runs under every schedule. A test that expects a finding takes it by `settle()`.
class EverySchedule : public testing::TestWithParam<Schedule> {
 protected:
  void SetUp() override { configure({}); }
  void TearDown() override {
    EXPECT_EQ(Machine::instance().settle(), "");
    Machine::instance().configure({});
  }

  /// Sets all but schedule and pauses.
  static void configure(Settings settings) {
    settings.schedule = GetParam();
    settings.max_delay_us = 300;
    Machine::instance().configure(settings);
  }
};

inline std::string schedule_name(const testing::TestParamInfo<Schedule>& info) {
  static constexpr const char* kNames[] = {"AtOnce", "Random", "Late", "LateDefault", "LateOthers"};
  return kNames[static_cast<int>(info.param)];
}

inline auto every_schedule() {
  return testing::Values(Schedule::at_once, Schedule::random, Schedule::late, Schedule::late_default,
                         Schedule::late_others);
}

}  // namespace deeptide::simulated
