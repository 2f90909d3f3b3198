// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The doctor's judgements, and its command on this machine.
#include "launch/commands/doctor/doctor.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "launch/launched.h"
#include "launch/system/child_output.h"

namespace deeptide::launch {
namespace {

using Verdict = Finding::Verdict;

TEST(Doctor, JudgesSizesAndLimits) {
  EXPECT_EQ(judge_shared_memory(63 << 20).verdict, Verdict::fail);
  EXPECT_EQ(judge_shared_memory(64 << 20).verdict, Verdict::warn);
  EXPECT_EQ(judge_shared_memory(uint64_t{1} << 30).verdict, Verdict::ok);
  EXPECT_EQ(judge_locked_memory(64 << 10).verdict, Verdict::warn);
  EXPECT_EQ(judge_locked_memory(UINT64_MAX).verdict, Verdict::ok);
  EXPECT_EQ(judge_open_files(1024).verdict, Verdict::warn);
  EXPECT_EQ(judge_open_files(4096).verdict, Verdict::ok);
  EXPECT_EQ(judge_huge_pages("always madvise [never]").verdict, Verdict::warn);
  EXPECT_EQ(judge_huge_pages("").verdict, Verdict::warn);
  EXPECT_EQ(judge_huge_pages("always [madvise] never").text, "madvise");
  EXPECT_EQ(judge_io_uring(0).verdict, Verdict::ok);
  EXPECT_EQ(judge_io_uring(0, false).verdict, Verdict::warn);
  EXPECT_TRUE(has(judge_io_uring(0, false).cure, "liburing"));
  EXPECT_TRUE(has(judge_io_uring(EPERM).cure, "seccomp"));
  EXPECT_TRUE(has(judge_io_uring(ENOSYS).cure, "Linux 5.1"));
}

TEST(Doctor, SaysACureWithAllThatIsNotOk) {
  for (const Finding& finding : {judge_shared_memory(0), judge_locked_memory(0), judge_huge_pages("[never]"),
                                 judge_huge_pages(""), judge_open_files(1), judge_io_uring(EPERM)}) {
    EXPECT_FALSE(finding.cure.empty()) << finding.subject;
    EXPECT_TRUE(has(to_line(finding), ". Cure: "));
  }
  EXPECT_EQ(to_line(judge_io_uring(0)), "ok    io_uring: works");
}

TEST(Doctor, TellsWhatIsWrongWithAPythonThatDoesNotWork) {
  const TempFolder folder;
  const std::string python = folder.script("python", "#!/bin/sh\necho broken >&2\nexit 3\n");
  const LaunchResult result = launch({"doctor", "--python", python});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(has(result.output, "fail  python: " + python + " ended with code 3: broken")) << result.output;
  EXPECT_TRUE(has(result.output, "io_uring")) << "the rest is examined all the same";
}

TEST(Doctor, TriesTheLoginToEachHost) {
  const TempFolder folder;
  const std::string version = launch({"--version"}).output;
  folder.script("ssh",
                "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\ncase $2 in\n"
                "good) echo Welcome; echo '" +
                    version +
                    "';;\nold) echo deeptide 0.0.9;;\n"
                    "bare) echo 'sh: deeptide: not found' >&2; exit 127;;\nodd) echo Welcome;;\n"
                    "*) echo 'no route' >&2; exit 255;;\nesac\n");
  const std::string python = folder.script("python", "#!/bin/sh\nexit 0\n");
  const std::string hosts =
      folder.script("hosts", "good slots=2\nbad slots=2\nold slots=2\nbare slots=2\nodd slots=2\n");
  const LaunchResult result =
      launch({"doctor", "--python", python, "-H", hosts}, {{"PATH", folder.path("") + ":/usr/bin:/bin"}});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(has(result.output, "ok    ssh good: the login works without a password; " + version)) << result.output;
  EXPECT_TRUE(has(result.output, "fail  ssh old: has deeptide 0.0.9, but this host has ")) << result.output;
  EXPECT_TRUE(has(result.output, "fail  ssh bare: the login works, but the host has no deeptide command. Cure: "))
      << result.output;
  EXPECT_TRUE(has(result.output, "fail  ssh odd: Welcome. Cure: ")) << result.output;
  EXPECT_TRUE(has(result.output, "fail  ssh bad: no route. Cure: ")) << result.output;
}

TEST(ChildOutput, EndsAChildThatIsLate) {
  const ChildOutput late = run_child({"sh", "-c", "echo first; sleep 60 & sleep 60"}, 0.3);
  EXPECT_TRUE(late.late);
  EXPECT_EQ(late.text, "first\n");
  EXPECT_EQ(run_child({"sh", "-c", "exit 4"}, 5).code, 4);
  EXPECT_EQ(run_child({"/no/such/program"}, 5).code, 127);
}

}  // namespace
}  // namespace deeptide::launch
