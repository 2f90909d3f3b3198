// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// bench io: sizes, that it leaves nothing behind, and its command.
#include "launch/commands/bench/io_bench.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>

#include "io/io_engine.h"
#include "launch/launched.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

IoBench small(const TempFolder& folder) {
  IoBench bench;
  bench.folder = folder.path("");
  bench.io_bytes = 1 << 20;
  bench.block_bytes = 64 << 10;
  bench.num_files = 3;
  bench.queue_depth = 5;  // does not divide the blocks
  bench.num_loops = 2;
  return bench;
}

/// Those that can be used here.
std::vector<IoEngine> engines() {
  std::vector<IoEngine> all{IoEngine::threads};
  if (io::io_uring_obstacle().empty()) all.push_back(IoEngine::io_uring);
  return all;
}

TEST(IoBench, WritesAndReadsAndLeavesNothing) {
  for (const IoEngine engine : engines()) {
    for (const bool direct : {true, false}) {
      const TempFolder folder;
      IoBench bench = small(folder);
      bench.engine = engine;
      bench.direct = direct;
      EXPECT_EQ(run_io_bench(bench).bytes, 3 << 20);
      bench.read = bench.validate = true;
      const IoResult result = run_io_bench(bench);
      EXPECT_GT(result.gb_per_s(), 0.0);
      EXPECT_EQ(result.engine, engine);
      EXPECT_FALSE(!direct && result.direct);
      EXPECT_TRUE(std::filesystem::is_empty(folder.path("")));
    }
  }
}

/// A file of 16 blocks of 4096 bytes, each filled with its number, through three buffers.
struct Pass : io::Pass {
  explicit Pass(const std::string& name) {
    path = name;
    fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    bytes = 16 * 4096;
    block_bytes = 4096;
    for (auto& buffer : buffers) blocks.push_back(buffer.data());
    prepare = [this](size_t buffer, int64_t at) { std::memset(blocks[buffer], number(at), 4096); };
    inspect = [this](size_t buffer, int64_t at) {
      for (const char byte : buffers[buffer]) num_wrong += byte != number(at);
      ++num_inspected;
    };
  }
  ~Pass() { ::close(fd); }
  static char number(int64_t at) { return static_cast<char>('a' + at / 4096); }

  std::array<std::array<char, 4096>, 3> buffers;
  std::atomic<int> num_wrong = 0, num_inspected = 0;
};

void (*transfer_of(IoEngine engine))(const io::Pass&) {
  return engine == IoEngine::io_uring ? io::transfer_by_io_uring : io::transfer_by_threads;
}

TEST(IoEngine, PutsEachBlockWhereItBelongs) {
  for (const IoEngine engine : engines()) {
    const TempFolder folder;
    Pass pass(folder.path("file"));
    transfer_of(engine)(pass);
    const std::string text = read_file(pass.path);
    ASSERT_EQ(text.size(), 16u * 4096);
    for (size_t i = 0; i < text.size(); ++i) ASSERT_EQ(text[i], Pass::number(static_cast<int64_t>(i)));
    pass.read = true;
    transfer_of(engine)(pass);
    EXPECT_EQ(pass.num_inspected, 16);
    EXPECT_EQ(pass.num_wrong, 0);
  }
}

TEST(IoEngine, TellsAboutAShortFileAndPassesOnWhatACallbackThrows) {
  for (const IoEngine engine : engines()) {
    const TempFolder folder;
    Pass pass(folder.path("file"));
    transfer_of(engine)(pass);
    pass.read = true;
    ASSERT_EQ(::ftruncate(pass.fd, 9 * 4096 + 17), 0);
    try {
      transfer_of(engine)(pass);
      ADD_FAILURE() << "the short file was not noticed";
    } catch (const std::system_error& error) {
      EXPECT_EQ(error.code().value(), EIO);
      EXPECT_NE(std::string(error.what()).find(pass.path), std::string::npos);
    }
    pass.inspect = [](size_t, int64_t at) {
      if (at == 2 * 4096) throw std::runtime_error("wrong");
    };
    pass.bytes = 9 * 4096;
    EXPECT_THROW(transfer_of(engine)(pass), std::runtime_error);
  }
}

TEST(IoBench, FallsBackToThreadsAndSaysSo) {
  const TempFolder folder;
  const IoResult result = run_io_bench(small(folder));
  EXPECT_EQ(result.engine == IoEngine::threads, !result.obstacle.empty()) << result.obstacle;
  EXPECT_EQ(result.obstacle, io::io_uring_obstacle());
  IoBench bench = small(folder);
  bench.engine = IoEngine::io_uring;
  if (!result.obstacle.empty()) {
    EXPECT_THROW(run_io_bench(bench), UsageError);
  }
}

TEST(IoBench, RefusesWhatDoesNotDivide) {
  const TempFolder folder;
  IoBench bench = small(folder);
  bench.block_bytes = 1000;
  EXPECT_THROW(run_io_bench(bench), UsageError);
  bench.block_bytes = 12288;
  EXPECT_THROW(run_io_bench(bench), UsageError);
  bench = small(folder);
  bench.num_files = 64;
  bench.queue_depth = 65;
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
  EXPECT_NE(result.output.find("read: "), std::string::npos) << result.output;
  const LaunchResult threads = launch({"bench", "io", "--folder", folder.path(""), "--engine", "threads", "--io_size",
                                       "64K", "--block_size", "4K", "--queue_depth", "2", "--buffered"});
  EXPECT_EQ(threads.output.find("write: "), 0u) << threads.output << threads.errors;
  EXPECT_NE(threads.output.find("(threads, 4 files, 2 requests of 4K in each, best of 3); through the page cache"),
            std::string::npos)
      << threads.output;
  EXPECT_EQ(launch({"bench", "io", "--folder", folder.path(""), "--engine", "libaio"}).exit_code, 2);
  EXPECT_EQ(launch({"bench", "comms"}).exit_code, 2);
}

}  // namespace
}  // namespace deeptide::launch
