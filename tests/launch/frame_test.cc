// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What launcher and agents say: frames in any pieces, payloads of any bytes, and streams that are none.
#include "launch/wire/frame.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "launch/wire/agent_job.h"

namespace deeptide::launch {
namespace {

TEST(Frame, ArrivesWholeWhateverThePieces) {
  const std::vector<Frame> sent = {{FrameKind::output, 7, std::string("a\0b\n", 4)},
                                   {FrameKind::beat, -1, ""},
                                   {FrameKind::errors, 1 << 20, std::string(70'000, 'x')}};
  std::string stream = "Welcome!\nDEEPTIDE-AGENT\n" + std::string(kPreamble);
  for (const Frame& frame : sent) stream += encode(frame);
  for (size_t piece : {size_t{1}, size_t{3}, size_t{4096}, stream.size()}) {
    FrameReader reader(true);
    std::vector<Frame> received;
    for (size_t at = 0; at < stream.size(); at += piece) {
      reader.feed(std::string_view(stream).substr(at, piece));
      while (auto frame = reader.next()) received.push_back(*frame);
    }
    EXPECT_EQ(received, sent) << "in pieces of " << piece;
    EXPECT_EQ(reader.noise(), "Welcome!\nDEEPTIDE-AGENT\n");
  }
}

TEST(Frame, FollowsAPreambleAtTheVeryBeginning) {
  FrameReader reader(true);
  reader.feed(std::string(kPreamble.substr(1)) + encode({FrameKind::done, 3, "x"}));
  EXPECT_EQ(reader.next(), (Frame{FrameKind::done, 3, "x"}));
}

TEST(Frame, IsRefusedIfItCannotBeOne) {
  for (const std::string& bytes :
       {std::string("\0\0\0\0", 4), std::string("\xff\xff\xff\xff", 4), std::string("\5\0\0\0\x7f\0\0\0\0", 9)}) {
    FrameReader reader(false);
    reader.feed(bytes);
    EXPECT_THROW(reader.next(), std::runtime_error);
  }
}

TEST(AgentJob, TravelsWithAnyBytes) {
  AgentJob job;
  std::string all;
  for (int byte = 1; byte < 256; ++byte) all += static_cast<char>(byte);
  job.options.command = {"run", all, ""};
  job.options.bind_core_list = "0-3";
  job.place = {1, 2, 3, 4, 9, "10.0.0.1", 29500, {0, 2}, {{"NAME", all}}};
  job.folder = "/tmp/\xff";
  const AgentJob back = job_from_text(to_text(job));
  EXPECT_EQ(back.options.command, job.options.command);
  EXPECT_EQ(back.options.bind_core_list, "0-3");
  EXPECT_EQ(back.place.environment, job.place.environment);
  EXPECT_EQ(back.place.devices, job.place.devices);
  EXPECT_EQ(back.place.world_size, 9);
  EXPECT_EQ(back.folder, job.folder);
}

TEST(AgentJob, IsRefusedIfAPartIsMissing) {
  EXPECT_THROW(job_from_text("{}"), std::exception);
  EXPECT_THROW(job_from_text("not json"), std::exception);
}

}  // namespace
}  // namespace deeptide::launch
