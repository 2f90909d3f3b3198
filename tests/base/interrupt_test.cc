// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Signals' handlers during waits: when they run, and what becomes of what they throw.
#include "base/interrupt.h"

#include <gtest/gtest.h>

#include <future>
#include <stdexcept>
#include <string>

#include "deeptide/interpreter.h"

namespace deeptide {
namespace {

/// Installs a check while it lives.
struct Check {
  explicit Check(InterruptCheck check) { set_interrupt_check(std::move(check)); }
  ~Check() { set_interrupt_check({}); }
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(Interrupt, IsThrownByTheCheckThatABindingInstalled) {
  EXPECT_EQ(error_of(check_interrupts), "");
  const Check check([] { throw std::runtime_error("^C"); });
  EXPECT_EQ(error_of(check_interrupts), "^C");
  EXPECT_EQ(error_of(check_interrupts), "^C") << "the first one left nothing behind";
}

TEST(Interrupt, HandlersMayNotUseWhatTheyInterrupted) {
  std::string told;
  int calls = 0;
  const Check check([&] {
    ++calls;
    check_interrupts();  // a handler that waits is not interrupted by itself
    told = error_of([] { refuse_in_interrupt_handler("step()"); });
  });
  check_interrupts();
  EXPECT_EQ(calls, 1);
  EXPECT_NE(told.find("the handler of a signal called step()"), std::string::npos) << told;
  EXPECT_NE(told.find("set a flag"), std::string::npos) << told;
  EXPECT_EQ(error_of([] { refuse_in_interrupt_handler("step()"); }), "");
}

TEST(RunBeside, ReturnsWhatTheWorkReturnsOrThrows) {
  EXPECT_EQ(run_beside<int>([] { return 7; }, [] {}), 7);
  EXPECT_EQ(error_of([] { run_beside<int>([]() -> int { throw std::runtime_error("no"); }, [] {}); }), "no");
}

TEST(RunBeside, LeavesWorkThatDoesNotEndWhenInterrupted) {
  auto may_end = std::make_shared<std::promise<void>>();
  auto ended = std::make_shared<std::promise<void>>();
  const auto work = [may_end, ended] {
    may_end->get_future().wait();
    ended->set_value();
    return 7;
  };
  EXPECT_EQ(error_of([&] { run_beside<int>(work, [] { throw std::runtime_error("^C"); }); }), "^C");
  may_end->set_value();
  ended->get_future().wait();
}

}  // namespace
}  // namespace deeptide
