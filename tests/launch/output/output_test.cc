// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lines: cut, prefixed, redrawn, and written without mixing.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <sstream>

#include "launch/launched.h"
#include "launch/output/line_splitter.h"

namespace deeptide::launch {
namespace {

using std::chrono::seconds;

/// A pipe with a sink at its writing end.
struct SinkOnPipe {
  std::array<int, 2> ends;
  Sink sink;

  SinkOnPipe() : ends(make()), sink(ends[1]) {}
  ~SinkOnPipe() {
    close(ends[0]);
    close(ends[1]);
  }
  static std::array<int, 2> make() {
    std::array<int, 2> made;
    EXPECT_EQ(pipe2(made.data(), O_CLOEXEC), 0);
    return made;
  }
  std::string read_all() {
    sink.flush(Clock::now() + seconds(5));
    std::string text(64 * 1024, '\0');
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    const ssize_t got = read(ends[0], text.data(), text.size());
    text.resize(got > 0 ? got : 0);
    return text;
  }
};

TEST(LineSplitter, WritesALineOnceItIsComplete) {
  SinkOnPipe pipe;
  LineSplitter lines("[rank 3] ", pipe.sink);
  lines.feed("he");
  EXPECT_EQ(pipe.read_all(), "");
  lines.feed("llo\nsecond\n\nthi");
  EXPECT_EQ(pipe.read_all(), "[rank 3] hello\n[rank 3] second\n[rank 3] \n");
  lines.finish();
  EXPECT_EQ(pipe.read_all(), "[rank 3] thi\n");
  lines.finish();
  EXPECT_EQ(pipe.read_all(), "");
}

TEST(LineSplitter, NamesTheRankOnce) {
  SinkOnPipe pipe;
  LineSplitter lines("[rank 3] ", pipe.sink);
  lines.feed("[rank3]: Traceback\n[rank3]:   File\n[rank3]:\n[rank x]: a\n[rank12\n");
  EXPECT_EQ(pipe.read_all(),
            "[rank 3] Traceback\n[rank 3]   File\n[rank 3] \n[rank 3] [rank x]: a\n[rank 3] [rank12\n");
  LineSplitter bare("", pipe.sink);
  bare.feed("[rank3]: a\n");
  EXPECT_EQ(pipe.read_all(), "[rank3]: a\n");
}

TEST(LineSplitter, ShowsTheLastStateOfARedrawnLine) {
  SinkOnPipe pipe;
  LineSplitter lines("", pipe.sink);
  lines.feed("10%\r50%\r100%\ndone\r\n");
  EXPECT_EQ(pipe.read_all(), "100%\ndone\n");
}

TEST(LineSplitter, ShowsARedrawnLineEveryTenSeconds) {
  SinkOnPipe pipe;
  LineSplitter lines("", pipe.sink);
  const Clock::time_point start{seconds(1000)};
  lines.feed("1%\r", start);
  lines.feed("5%\r", start + seconds(9));
  EXPECT_EQ(pipe.read_all(), "");
  lines.feed("6%\r", start + seconds(10));
  EXPECT_EQ(pipe.read_all(), "6%\n");
  lines.feed("7%\r", start + seconds(19));
  EXPECT_EQ(pipe.read_all(), "");
}

TEST(LineSplitter, KeepsTheLastFiftyLines) {
  SinkOnPipe pipe;
  LineSplitter lines("", pipe.sink);
  for (int i = 0; i < 80; ++i) lines.feed(std::to_string(i) + "\n");
  EXPECT_EQ(lines.tail().size(), 50u);
  EXPECT_EQ(lines.tail().front(), "30");
  EXPECT_EQ(lines.tail().back(), "79");
}

TEST(LineSplitter, CutsALineThatNeverEnds) {
  SinkOnPipe pipe;
  LineSplitter lines("", pipe.sink);
  lines.feed(std::string(100'000, 'x'));
  EXPECT_FALSE(pipe.sink.empty());
}

TEST(Sink, WritesWholeLinesAtATime) {
  SinkOnPipe pipe;
  for (int i = 0; i < 200; ++i) pipe.sink.push(std::string(99, 'a') + "\n");
  pipe.sink.write_some();
  std::string text(64 * 1024, '\0');
  text.resize(read(pipe.ends[0], text.data(), text.size()));
  EXPECT_EQ(text.size(), 4000u);  // of PIPE_BUF, 4096
  EXPECT_EQ(text.back(), '\n');
}

TEST(Sink, GivesUpOnAReaderThatIsGone) {
  signal(SIGPIPE, SIG_IGN);
  SinkOnPipe pipe;
  close(pipe.ends[0]);
  pipe.sink.push("text\n");
  pipe.sink.flush(Clock::now() + seconds(5));
  EXPECT_TRUE(pipe.sink.closed());
  EXPECT_TRUE(pipe.sink.empty());
  pipe.ends[0] = open("/dev/null", O_RDONLY);
}

TEST(Sink, GivesUpOnAReaderThatDoesNotRead) {
  SinkOnPipe pipe;
  pipe.sink.push(std::string(2 << 20, 'x'));
  EXPECT_TRUE(pipe.sink.full());
  const auto start = Clock::now();
  pipe.sink.flush(start + std::chrono::milliseconds(50));
  EXPECT_LT(Clock::now() - start, seconds(5));
  EXPECT_FALSE(pipe.sink.empty());
}

TEST(Output, NeverMixesLinesOfRanksThatWriteAtOnce) {
  TempFolder folder;
  const std::string script = folder.script("talk.py", R"(
import os, sys
for i in range(2000):
    os.write(1, (os.environ['RANK'] * 37).encode())
    os.write(1, b'\n')
)");
  const LaunchResult result = launch({"--num_ranks", "3", script});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  size_t count = 0;
  std::istringstream lines(result.output);
  for (std::string line; std::getline(lines, line); ++count) {
    const std::string rank = line.substr(6, 1);
    ASSERT_EQ(line, "[rank " + rank + "] " + std::string(37, rank[0]));
  }
  EXPECT_EQ(count, 6000u);
}

TEST(Output, KeepsStandardOutputAndErrorsApart) {
  const LaunchResult result = launch({"-q", "--num_ranks", "2", "sh", "-c", "echo out; echo err >&2"});
  EXPECT_EQ(result.output.find("err"), std::string::npos);
  EXPECT_EQ(result.errors.find("out"), std::string::npos);
  EXPECT_NE(result.errors.find("[rank 1] err\n"), std::string::npos);
}

TEST(Output, EndsAnUnfinishedLine) {
  EXPECT_EQ(launch({"--num_ranks", "1", "printf", "no newline"}).output, "[rank 0] no newline\n");
}

TEST(Output, GoesToAFileForEachRankIfAsked) {
  TempFolder folder;
  const std::string logs = folder.path("logs/run");
  const LaunchResult result = launch({"-q", "--num_ranks", "2", "--enable_each_rank_log", logs, "sh", "-c",
                                      "echo out $RANK; echo why it failed >&2; test $RANK = 0 && sleep 60; exit 5"});
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_EQ(result.output, "");
  EXPECT_NE(result.errors.find("last lines of rank 1"), std::string::npos) << result.errors;
  EXPECT_NE(result.errors.find("  why it failed\n"), std::string::npos) << result.errors;
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(logs)) {
    const std::string name = entry.path().filename().string();
    const std::string rank = name.substr(name.find("_rank") + 5, 1);
    EXPECT_NE(read_file(entry.path()).find("out " + rank + "\n"), std::string::npos) << name;
    ++files;
  }
  EXPECT_EQ(files, 2);
}

}  // namespace
}  // namespace deeptide::launch
