// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs kernels in their tests with a given number of threads, on a given instruction set.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cstdint>

namespace deeptide {

/// Small operators on busy cores would spend their time waking threads; the tests about threads ask for two.
class OneThread : public testing::Environment {
  void SetUp() override { at::set_num_threads(1); }
};
inline const auto* const kOneThread = testing::AddGlobalTestEnvironment(new OneThread);

class Threads {
 public:
  explicit Threads(int count) : before_(at::get_num_threads()) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before_); }

 private:
  int before_;
};

class Target {
 public:
  explicit Target(int64_t target) { choose(target); }
  ~Target() { choose(0); }

 private:
  static void choose(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

}  // namespace deeptide
