// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Examines this machine for training, and reports problems with their cures.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deeptide::launch {

struct Options;

struct Finding {
  enum class Verdict : uint8_t { ok, warn, fail } verdict;
  std::string subject;
  std::string text;
  std::string cure;  // empty when ok
};

/// Each function judges one fact that it gets as an argument, so that tests can pass any value.
Finding judge_shared_memory(uint64_t free_bytes);
Finding judge_locked_memory(uint64_t limit_bytes);     // UINT64_MAX: unlimited
Finding judge_huge_pages(const std::string& setting);  // the text of transparent_hugepage/enabled; empty: no such file
Finding judge_open_files(uint64_t limit);
Finding judge_io_uring(int error,
                       bool built = true);  // errno of io_uring_setup, 0: success; `built` false: no liburing

/// Examines this machine, and its torch through a Python child.
std::vector<Finding> examine_machine(const std::string& python);
/// Logs in to a host as the launcher does, with the ssh settings of `options`, and runs the command there.
Finding examine_host(const Options& options, const std::string& host);

/// Returns a line such as "warn  huge pages: never. Cure: …".
std::string to_line(const Finding& finding);

}  // namespace deeptide::launch
