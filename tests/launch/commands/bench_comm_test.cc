// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// bench comm: the job that it starts, told by a Python that only shows its arguments; and what it refuses.
#include <gtest/gtest.h>

#include "launch/launched.h"

namespace deeptide::launch {
namespace {

using Words = std::vector<std::string>;

class BenchComm : public testing::Test {
 protected:
  LaunchResult run(const Words& words) {
    Words all{"bench", "comm", "--python", python_};
    all.insert(all.end(), words.begin(), words.end());
    return launch(all, {{"CUDA_VISIBLE_DEVICES", ""}});
  }
  /// The words that a rank's Python was told, behind the module's name.
  std::string told(const Words& words) {
    const LaunchResult result = run(words);
    const std::string head = "-m deeptide._commands.bench_comm ";
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    EXPECT_EQ(result.output.find(head), 0u) << result.output;
    return result.output.substr(std::min(head.size(), result.output.size()));
  }

  TempFolder folder_;
  std::string python_ = folder_.script("python", "#!/bin/sh\n[ $RANK = 0 ] && echo \"$@\" of $WORLD_SIZE\nexit 0\n");
};

TEST_F(BenchComm, TimesEverythingBetweenTwoRanksByDefault) {
  EXPECT_EQ(told({}),
            "--collectives all-reduce,all-gather,reduce-scatter,all-to-all,broadcast --sizes "
            "4096,16384,65536,262144,1048576,4194304,16777216,67108864 --dtype fp32 --trials 10 --warmups 3 --bw-unit "
            "GBps --format table of 2\n");
}

TEST_F(BenchComm, TakesDsBenchsOptionsAndThoseOfAJob) {
  EXPECT_EQ(
      told({"--num_ranks", "3",         "--all-gather", "--broadcast",    "--scan",   "--minsize", "64K",
            "--maxsize",   "18",        "--dtype",      "torch.bfloat16", "--trials", "5",         "--warmups",
            "0",           "--bw-unit", "Gbps",         "--raw",          "--c10d",   "-q",        "--master_port=0"}),
      "--collectives all-gather,broadcast --sizes 65536,131072,262144 --dtype bf16 --trials 5 --warmups 0 "
      "--bw-unit Gbps --format raw --no-shared-memory of 3\n");
  EXPECT_EQ(told({"--json", "--all-to-all", "--minsize", "100", "--maxsize", "500"}),
            "--collectives all-to-all --sizes 100,400,500 --dtype fp32 --trials 10 --warmups 3 --bw-unit GBps --format "
            "json of 2\n");
}

TEST_F(BenchComm, SaysWhatItDoesNotUnderstand) {
  const std::pair<Words, const char*> cases[] = {
      {{"--async-op"}, "unknown option '--async-op'"},
      {{"all-reduce"}, "deeptide bench comm: got 'all-reduce', expected options only"},
      {{"--maxsize", "64X"}, "invalid size '64X'"},
      {{"--maxsize", "63"}, "invalid size '63': expected at most 1024G"},
      {{"--minsize", "2M", "--maxsize", "1M"}, "--minsize 2M is above --maxsize 1M"},
      {{"--dtype", "int8"}, "--dtype"},
      {{"--trials", "0"}, "--trials"},
      {{"--raw", "--json"}, "--raw excludes --json"},
  };
  for (const auto& [words, text] : cases) {
    const LaunchResult result = run(words);
    EXPECT_EQ(result.exit_code, 2) << words[0];
    EXPECT_NE(result.errors.find(text), std::string::npos) << result.errors;
  }
}

TEST_F(BenchComm, PassesAFailureOn) {
  folder_.script("python", "#!/bin/sh\necho wrong result >&2\nexit 7\n");
  const LaunchResult result = run({});
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_NE(result.errors.find("wrong result"), std::string::npos) << result.errors;
}

TEST(RankPrefix, IsLeftOutWhereAsked) {
  EXPECT_EQ(launch({"-q", "--no_rank_prefix", "--num_ranks", "2", "sh", "-c", "echo x"}).output, "x\nx\n");
  EXPECT_EQ(launch({"-q", "--num_ranks", "1", "sh", "-c", "echo x"}).output, "x\n");
  EXPECT_EQ(launch({"--num_ranks", "1", "sh", "-c", "echo x"}).output, "[rank 0] x\n");
  EXPECT_NE(launch({"-q", "--num_ranks", "2", "sh", "-c", "echo x"}).output.find("[rank 1] x\n"), std::string::npos);
}

}  // namespace
}  // namespace deeptide::launch
