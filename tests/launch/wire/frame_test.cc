// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Exchanges launcher's and agents' words: frames in any pieces, payloads of any bytes, and streams that are none.
#include "launch/wire/frame.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "launch/wire/messages.h"

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
  job.options.grace_s = 0.125;
  job.options.hang_timeout_s = 7.5;
  job.options.rank_prefix = false;
  job.place = {.node_rank = 1,
               .num_nodes = 2,
               .first_rank = 3,
               .num_ranks = 4,
               .world_size = 9,
               .master_addr = "10.0.0.1",
               .master_port = 29500,
               .devices = {0, 2},
               .environment = {{"NAME", all}}};
  job.folder = "/tmp/\xff";
  const AgentJob back = decode<AgentJob>(encode(job));
  EXPECT_EQ(back.options.command, job.options.command);
  EXPECT_EQ(back.options.bind_core_list, "0-3");
  EXPECT_EQ(back.options.grace_s, 0.125);
  EXPECT_EQ(back.options.hang_timeout_s, 7.5);
  EXPECT_FALSE(back.options.rank_prefix);
  EXPECT_FALSE(decode<AgentJob>(encode(AgentJob{.options = {.command = {"x"}}})).options.grace_s.has_value());
  EXPECT_EQ(back.place.environment, job.place.environment);
  EXPECT_EQ(back.place.devices, job.place.devices);
  EXPECT_EQ(back.place.world_size, 9);
  EXPECT_EQ(back.folder, job.folder);
}

TEST(Messages, ArriveAsTheyWereSent) {
  const auto request = decode<PortRequest>(encode(PortRequest{.port = 4711, .fixed = true}));
  EXPECT_EQ(request.port, 4711);
  EXPECT_TRUE(request.fixed);
  EXPECT_EQ(decode<PortAnswer>(encode(PortAnswer{29501})).port, 29501);
  const auto stop = decode<Ending::Request>(encode(Ending::Request{.signal = 2, .grace_s = 0.25}));
  EXPECT_EQ(stop.signal, 2);
  EXPECT_EQ(stop.grace_s, 0.25);
  const auto hello = decode<AgentHello>(encode(AgentHello{.version = "1.2", .addresses = {"10.0.0.1", "fe::1"}}));
  EXPECT_EQ(hello.version, "1.2");
  EXPECT_EQ(hello.addresses, (std::vector<std::string>{"10.0.0.1", "fe::1"}));
  EXPECT_EQ(decode<Late>(encode(Late{12.5})).waited_s, 12.5);
  const RankExit exit =
      decode<RankExit>(encode(RankExit{{.signal = 9, .peak_bytes = 1 << 20, .out_of_memory = true}, true}));
  EXPECT_EQ(exit.status.signal, 9);
  EXPECT_EQ(exit.status.peak_bytes, 1 << 20);
  EXPECT_TRUE(exit.status.out_of_memory);
  EXPECT_TRUE(exit.asked);
  const RankHello rank = decode<RankHello>(encode(RankHello{"1.2", 3, 8, 1, "node"}));
  EXPECT_EQ(rank.rank, 3);
  EXPECT_EQ(rank.world_size, 8);
  EXPECT_EQ(rank.node_rank, 1);
  EXPECT_EQ(rank.host, "node");
}

TEST(Messages, AreRefusedIfTheyAreOthers) {
  EXPECT_THROW(decode<PortRequest>(encode(PortAnswer{1})), std::exception) << "a part is missing";
  EXPECT_THROW(decode<PortAnswer>(encode(RankHello{})), std::exception);
  EXPECT_THROW(decode<Late>(""), std::exception);
  EXPECT_THROW(decode<Late>("{\"waited_s\": 1}"), std::exception) << "text is no message";
}

TEST(AgentJob, IsRefusedIfAPartIsMissing) {
  EXPECT_THROW(decode<AgentJob>("{}"), std::exception);
  EXPECT_THROW(decode<AgentJob>("not json"), std::exception);
}

}  // namespace
}  // namespace deeptide::launch
