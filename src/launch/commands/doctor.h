// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What this machine offers a training, and what it lacks with the cure.
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

/// Each judges one thing from what it is given, so that tests can give anything.
Finding judge_shared_memory(uint64_t free_bytes);
Finding judge_locked_memory(uint64_t limit_bytes);     // UINT64_MAX: unlimited
Finding judge_huge_pages(const std::string& setting);  // the text of transparent_hugepage/enabled; empty: no such file
Finding judge_open_files(uint64_t limit);
Finding judge_io_uring(int error, bool built = true);  // errno of io_uring_setup, 0: it worked; false: no liburing

/// All of this machine; torch's part through a Python child.
std::vector<Finding> examine_machine(const std::string& python);
/// The login to a host as the launcher does it, and the command there. Of `options`: what concerns ssh.
Finding examine_host(const Options& options, const std::string& host);

/// "warn  huge pages: never. Cure: …"
std::string to_line(const Finding& finding);

}  // namespace deeptide::launch
