// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Encodes and cuts frames of a length, a kind, a rank and bytes.
#include "launch/wire/frame.h"

#include <stdexcept>

namespace deeptide::launch {
namespace {

constexpr size_t kLengthBytes = 4;
constexpr size_t kHeadBytes = 5;  // kind and rank
constexpr size_t kNoiseBytes = 4096;

void put(std::string& bytes, uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) bytes += static_cast<char>(value >> shift & 0xff);
}

uint32_t get(std::string_view bytes) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value |= static_cast<uint32_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  return value;
}

}  // namespace

std::string encode(const Frame& frame) {
  std::string bytes;
  bytes.reserve(kLengthBytes + kHeadBytes + frame.payload.size());
  put(bytes, static_cast<uint32_t>(kHeadBytes + frame.payload.size()));
  bytes += static_cast<char>(frame.kind);
  put(bytes, static_cast<uint32_t>(frame.rank));
  return bytes + frame.payload;
}

void FrameReader::feed(std::string_view bytes) {
  pending_.erase(0, used_);
  used_ = 0;
  pending_ += bytes;
  if (!skipping_) return;
  // The first byte of the stream begins a line.
  const size_t at = noise_.empty() && std::string_view(pending_).starts_with(kPreamble.substr(1))
                        ? 0
                        : (noise_ + pending_).find(kPreamble);
  if (at == std::string::npos) {
    noise_ += pending_;
    pending_.clear();
    if (noise_.size() > kNoiseBytes) noise_.erase(0, noise_.size() - kNoiseBytes);
    return;
  }
  skipping_ = false;
  const std::string all = noise_ + pending_;
  pending_ = all.substr(all.find(kPreamble.substr(1), at) + kPreamble.size() - 1);
  noise_ = all.substr(0, at);
}

std::optional<Frame> FrameReader::next() {
  if (skipping_) return std::nullopt;
  const std::string_view rest = std::string_view(pending_).substr(used_);
  if (rest.size() < kLengthBytes) return std::nullopt;
  const size_t length = get(rest);
  if (length < kHeadBytes || length > longest_) {
    throw std::runtime_error("a frame of " + std::to_string(length) + " bytes is out of range: the stream is corrupt");
  }
  if (rest.size() < kLengthBytes + length) return std::nullopt;
  const auto kind = static_cast<uint8_t>(rest[kLengthBytes]);
  if (kind > static_cast<uint8_t>(FrameKind::beat)) {
    throw std::runtime_error("a frame of unknown kind " + std::to_string(kind));
  }
  Frame frame{static_cast<FrameKind>(kind), static_cast<int32_t>(get(rest.substr(kLengthBytes + 1))),
              std::string(rest.substr(kLengthBytes + kHeadBytes, length - kHeadBytes))};
  used_ += kLengthBytes + length;
  return frame;
}

}  // namespace deeptide::launch
