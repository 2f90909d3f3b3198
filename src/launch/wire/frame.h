// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Defines the frames between the launcher and its agents, over any pair of byte streams.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace deeptide::launch {

/// Kind of a frame, with its payload (messages.h).
enum class FrameKind : uint8_t {
  // launcher to agent
  prepare,  // PortRequest
  start,    // AgentJob
  stop,     // Ending::Request
  kill,     // nothing
  suspend,  // nothing; acts like ^Z, and the agent expects no frame until `resume`
  resume,   // nothing
  ask,      // StateQuestion
  // agent (or `deeptide rank`) to launcher
  hello,    // AgentHello (or RankHello): the first frame
  port,     // PortAnswer
  refused,  // the reason as text; no rank runs on the host
  output,   // bytes of `rank`; empty: end of the stream
  errors,   // as `output`
  exited,   // RankExit of `rank`
  late,     // Late
  states,   // StateAnswer
  done,     // nothing; the last frame, after all ranks and their processes have ended
  // both
  beat,  // nothing; a heartbeat, so that silence means a broken connection
};

struct Frame {
  FrameKind kind = FrameKind::beat;
  int32_t rank = -1;
  std::string payload;

  bool operator==(const Frame&) const = default;
};

/// Wire format: length of the rest (4 bytes), kind (1), rank (4), payload; numbers are little-endian.
std::string encode(const Frame& frame);

/// An agent's stream begins with this line. The reader skips a login shell's output before it.
inline constexpr std::string_view kPreamble = "\nDEEPTIDE-AGENT 1\n";

/// Cuts a stream into frames.
class FrameReader {
 public:
  /// With `preamble`: frames begin after it. Frames longer than `longest` are errors.
  explicit FrameReader(bool preamble, size_t longest = kLongestFrame) : skipping_(preamble), longest_(longest) {}

  void feed(std::string_view bytes);
  /// Returns the next complete frame. Errors: std::runtime_error if the bytes are not a valid frame.
  std::optional<Frame> next();
  /// Returns the last 4 KiB before the preamble, which explain why no preamble arrived.
  const std::string& noise() const { return noise_; }
  bool begun() const { return !skipping_; }

 private:
  static constexpr size_t kLongestFrame = 64ull << 20;  // far above a plan of thousands of ranks

  bool skipping_;
  size_t longest_;
  std::string pending_, noise_;
  size_t used_ = 0;  // bytes of pending_
};

}  // namespace deeptide::launch
