// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which end of a rank is the cause, which line says why, and who says the same.
#include "launch/output/failure_report.h"

#include <gtest/gtest.h>

#include <csignal>

#include "base/text.h"
#include "launch/process/memory_kills.h"

namespace deeptide::launch {
namespace {

TEST(FailureReport, TakesTheFirstCode) {
  FailureReport report;
  report.on_exit(1, "", {0, 0}, 3);
  EXPECT_FALSE(report.failed());
  report.on_exit(2, "", {3, 0}, 2);
  report.on_exit(0, "", {1, 0}, 1);
  EXPECT_EQ(report.exit_code(), 3);
}

TEST(FailureReport, PrefersAKillThatIsHeardOfLater) {
  FailureReport report;
  report.on_exit(0, "a", {1, 0}, 3);
  report.on_exit(3, "b", {0, SIGKILL}, 2);
  report.on_exit(1, "a", {0, SIGSEGV}, 1);
  EXPECT_EQ(report.exit_code(), 128 + SIGKILL);
}

TEST(FailureReport, TakesAnAbortForAConsequence) {
  FailureReport report;
  report.on_exit(0, "", {5, 0}, 3);
  report.on_exit(1, "", {0, SIGABRT}, 2);
  EXPECT_EQ(report.exit_code(), 5);
}

TEST(FailureReport, NamesTheCoordinatesOfTheRankThatFailed) {
  FailureReport report;
  report.on_exit(5, "b", {0, SIGKILL}, 2, " (pipeline 1, data 0, tensor 1)");
  EXPECT_EQ(report.verdict().substr(0, 62), "rank 5 (pipeline 1, data 0, tensor 1) on b was killed by signa");
}

TEST(FailureReport, GivesALostHostTheCodeOfSsh) {
  FailureReport report;
  report.on_lost_host("w2", "is gone");
  EXPECT_EQ(report.exit_code(), 255);
}

TEST(LastError, FindsTheExceptionBelowATraceback) {
  EXPECT_EQ(last_error({"Traceback (most recent call last):", "  File \"x.py\", line 1, in <module>", "    main()",
                        "torch.cuda.OutOfMemoryError: no room", "closing: done"}),
            "torch.cuda.OutOfMemoryError: no room");
  EXPECT_EQ(last_error({"terminate called after throwing an instance of 'std::runtime_error'", "  what():  no file"}),
            "no file");
  EXPECT_EQ(last_error({"loss: 3.5", "step: 4"}), std::nullopt);
  EXPECT_EQ(last_error({}), std::nullopt);
}

TEST(GroupErrors, PutsTextsTogetherThatDifferInNumbersOnly) {
  const auto groups = group_errors({{0, "E: peer 3"}, {1, "E: peer 12"}, {2, "F: x"}, {5, "E: peer 1"}});
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].text, "E: peer 3");
  EXPECT_EQ(groups[0].ranks, (std::vector<int>{0, 1, 5}));
  EXPECT_EQ(groups[1].ranks, (std::vector<int>{2}));
}

TEST(JoinRanges, ShortensRuns) {
  EXPECT_EQ(join_ranges({0, 1, 2, 3, 7}), "0-3, 7");
  EXPECT_EQ(join_ranges({4, 5}), "4, 5");
  EXPECT_EQ(join_ranges({}), "");
}

TEST(MemoryKills, ReadsTheKernelsLine) {
  const std::string line =
      "6,1234,5678,-;Out of memory: Killed process 4242 (python3) total-vm:99kB, anon-rss:1024kB, file-rss:1024kB, "
      "shmem-rss:0kB, UID:0";
  EXPECT_EQ(resident_at_kill(line, 4242), 2 << 20);
  EXPECT_EQ(resident_at_kill(line, 424), -1);
}

TEST(BytesText, TakesTheLargestUnit) {
  EXPECT_EQ(bytes_text(512), "512 bytes");
  EXPECT_EQ(bytes_text(int64_t{15'247'146'189}), "14.2 GiB");
}

}  // namespace
}  // namespace deeptide::launch
