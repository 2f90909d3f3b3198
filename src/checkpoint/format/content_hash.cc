// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hashes of what files hold, by XXH3.
#include "checkpoint/format/content_hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <utility>

namespace deeptide::checkpoint {
namespace {

constexpr size_t kHalfDigits = 16;

ContentHash from_xxh(XXH128_hash_t hash) { return {hash.high64, hash.low64}; }

std::optional<uint64_t> half_of(const char* begin) {
  uint64_t value = 0;
  const auto parsed = std::from_chars(begin, begin + kHalfDigits, value, 16);
  return parsed.ec == std::errc() && parsed.ptr == begin + kHalfDigits ? std::optional(value) : std::nullopt;
}

}  // namespace

ContentHash ContentHash::of(const void* data, int64_t bytes) {
  return from_xxh(XXH3_128bits(data, static_cast<size_t>(bytes)));
}

std::optional<ContentHash> ContentHash::from_text(const std::string& text) {
  if (text.size() != 2 * kHalfDigits) return std::nullopt;
  const auto high = half_of(text.data());
  const auto low = half_of(text.data() + kHalfDigits);
  return high && low ? std::optional(ContentHash{*high, *low}) : std::nullopt;
}

std::string ContentHash::text() const {
  char text[2 * kHalfDigits + 1];
  std::snprintf(text, sizeof(text), "%016llx%016llx", static_cast<unsigned long long>(high),
                static_cast<unsigned long long>(low));
  return text;
}

struct BlockHasher::State {
  XXH3_state_t stream;
  int64_t in_block = 0;
  std::vector<ContentHash> hashes;

  void close_block() {
    hashes.push_back(from_xxh(XXH3_128bits_digest(&stream)));
    XXH3_128bits_reset(&stream);
    in_block = 0;
  }
};

BlockHasher::BlockHasher() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->stream); }
BlockHasher::~BlockHasher() = default;

void BlockHasher::update(const void* data, int64_t bytes) {
  const char* cursor = static_cast<const char*>(data);
  while (bytes > 0) {
    const int64_t taken = std::min(bytes, kHashedBlockBytes - state_->in_block);
    XXH3_128bits_update(&state_->stream, cursor, static_cast<size_t>(taken));
    state_->in_block += taken;
    if (state_->in_block == kHashedBlockBytes) state_->close_block();
    cursor += taken;
    bytes -= taken;
  }
}

std::vector<ContentHash> BlockHasher::finish() {
  if (state_->in_block > 0) state_->close_block();
  return std::exchange(state_->hashes, {});
}

}  // namespace deeptide::checkpoint
