// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// bench io: sizes, that it leaves nothing behind, and its command.
#include "launch/io_bench.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "launch/launched.h"
#include "launch/options.h"

namespace deeptide::launch {
namespace {

IoBench small(const TempFolder& folder) {
  IoBench bench;
  bench.folder = folder.path("");
  bench.io_bytes = 1 << 20;
  bench.block_bytes = 64 << 10;
  bench.num_threads = 3;
  bench.num_loops = 2;
  return bench;
}

TEST(IoBench, WritesAndReadsAndLeavesNothing) {
  const TempFolder folder;
  IoBench bench = small(folder);
  EXPECT_EQ(run_io_bench(bench).bytes, 3 << 20);
  bench.read = bench.validate = true;
  EXPECT_GT(run_io_bench(bench).gb_per_s(), 0.0);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path("")));
}

TEST(IoBench, RefusesWhatDoesNotDivide) {
  const TempFolder folder;
  IoBench bench = small(folder);
  bench.block_bytes = 1000;
  EXPECT_THROW(run_io_bench(bench), UsageError);
  bench.block_bytes = 12288;
  EXPECT_THROW(run_io_bench(bench), UsageError);
  bench = small(folder);
  bench.folder = folder.path("missing");
  EXPECT_THROW(run_io_bench(bench), std::system_error);
}

TEST(IoBench, ReadsSizesAsPeopleWriteThem) {
  EXPECT_EQ(parse_size("4096"), 4096);
  EXPECT_EQ(parse_size("3K"), 3072);
  EXPECT_EQ(parse_size("400M"), int64_t{400} << 20);
  EXPECT_EQ(parse_size("2G"), int64_t{2} << 30);
  for (const char* bad : {"", "M", "-1", "0", "1T", "1MB", "1.5G", "99999999999G"}) {
    EXPECT_THROW(parse_size(bad), UsageError) << bad;
  }
}

TEST(IoBench, IsACommand) {
  const TempFolder folder;
  const LaunchResult result =
      launch({"bench", "io", "--folder", folder.path(""), "--io_size", "1M", "--block_size", "64K", "--read"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.output.find("read: "), 0u) << result.output;
  EXPECT_EQ(launch({"bench", "comms"}).exit_code, 2);
}

}  // namespace
}  // namespace deeptide::launch
