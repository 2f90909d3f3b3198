// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Frames between the launcher and its agents, over any pair of byte streams.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace deeptide::launch {

/// What a frame says, and what its payload holds (messages.h).
enum class FrameKind : uint8_t {
  // launcher to agent
  prepare,  // PortRequest
  start,    // AgentJob
  stop,     // Ending::Request
  kill,     // nothing
  suspend,  // nothing: as ^Z; until `resume` the agent expects no frame
  resume,   // nothing
  ask,      // StateQuestion
  // agent (or `deeptide rank`) to launcher
  hello,    // AgentHello (or RankHello): the first frame
  port,     // PortAnswer
  refused,  // the reason as text: no rank runs here, and none will
  output,   // bytes of `rank`; none: end of the stream
  errors,   // the same
  exited,   // RankExit of `rank`
  late,     // Late
  states,   // StateAnswer
  done,     // nothing: all ranks have ended and left nothing behind; the last frame
  // both
  beat,  // nothing: makes silence mean a broken connection
};

struct Frame {
  FrameKind kind = FrameKind::beat;
  int32_t rank = -1;
  std::string payload;

  bool operator==(const Frame&) const = default;
};

/// On the wire: length of what follows (4 bytes), kind (1), rank (4), payload; numbers little-endian.
std::string encode(const Frame& frame);

/// An agent's stream begins with this line; output of a login shell before it is skipped.
constexpr std::string_view kPreamble = "\nDEEPTIDE-AGENT 1\n";

/// Cuts a stream into frames.
class FrameReader {
 public:
  /// With `preamble`: frames begin after it. Frames longer than `longest` are errors.
  explicit FrameReader(bool preamble, size_t longest = kLongestFrame) : skipping_(preamble), longest_(longest) {}

  void feed(std::string_view bytes);
  /// The next complete frame. Errors: std::runtime_error if the stream cannot be one of frames.
  std::optional<Frame> next();
  /// The last 4 KiB before the preamble: they explain a preamble that does not arrive.
  const std::string& noise() const { return noise_; }
  bool begun() const { return !skipping_; }

 private:
  static constexpr size_t kLongestFrame = 64ull << 20;  // far above a plan of thousands of ranks

  bool skipping_;
  size_t longest_;
  std::string pending_, noise_;
  size_t used_ = 0;  // of pending_
};

}  // namespace deeptide::launch
