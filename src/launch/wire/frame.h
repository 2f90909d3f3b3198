// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What the launcher and its agents say to each other: frames over any pair of byte streams.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace deeptide::launch {

enum class FrameKind : uint8_t {
  // launcher to agent
  prepare,  // {"port": N, "fixed": bool}: find a port for the rendezvous
  start,    // the ranks to start: an AgentJob
  stop,     // {"signal": N, "grace": S}
  kill,
  suspend,  // as ^Z; until resume no word from the launcher is expected
  resume,
  ask,  // what the ranks are doing: a StateQuestion
  // agent to launcher
  hello,    // {"version": "…", "addresses": ["…"]}: the first frame
  port,     // {"port": N}
  refused,  // text: nothing runs here, and nothing will
  output,   // bytes of `rank`; empty: end of the stream
  errors,
  exited,  // how `rank` ended: a RankExit
  late,    // {"waited": S}: a rank has waited for a collective for --hang_timeout; 0: somebody has moved on
  states,  // a StateAnswer
  done,    // all ranks have ended and left nothing behind: the last frame
  // both
  beat,  // so that silence means a broken connection
};

struct Frame {
  FrameKind kind = FrameKind::beat;
  int32_t rank = -1;
  std::string payload;

  bool operator==(const Frame&) const = default;
};

/// On the wire: length of what follows (4 bytes), kind (1), rank (4), payload; numbers little-endian.
std::string encode(const Frame& frame);

/// An agent's stream begins with this line; whatever a login shell printed before it is skipped.
constexpr std::string_view kPreamble = "\nDEEPTIDE-AGENT 1\n";

/// Cuts a stream into frames.
class FrameReader {
 public:
  /// With `preamble`: frames begin after it. Longer ones than `longest` are errors.
  explicit FrameReader(bool preamble, size_t longest = kLongestFrame) : skipping_(preamble), longest_(longest) {}

  void feed(std::string_view bytes);
  /// The next complete frame. Errors: std::runtime_error if the stream cannot be one of frames.
  std::optional<Frame> next();
  /// What came before the preamble, its last 4 KiB: the reason why there is none.
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
