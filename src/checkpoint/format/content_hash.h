// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hashes of what files hold, to find changed bytes and equal contents. They guard against accidents, not attackers.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace deeptide::checkpoint {

/// XXH3's 128 bits.
struct ContentHash {
  uint64_t high = 0;
  uint64_t low = 0;

  static ContentHash of(const void* data, int64_t bytes);
  /// The inverse of text(); none for other texts.
  static std::optional<ContentHash> from_text(const std::string& text);
  /// 32 hexadecimal digits.
  std::string text() const;
  bool operator==(const ContentHash&) const = default;
};

/// A piece's elements are hashed in blocks of this many bytes, so that a range can be checked without the rest.
inline constexpr int64_t kHashedBlockBytes = int64_t{8} << 20;
/// Names algorithm and block size in manifests. Hashes under another name are not read.
inline constexpr const char* kHashName = "xxh3-128/8388608";

/// Hashes bytes block by block as they come.
class BlockHasher {
 public:
  BlockHasher();
  ~BlockHasher();
  void update(const void* data, int64_t bytes);
  /// One hash per block, the last block may be shorter; begins anew.
  std::vector<ContentHash> finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace deeptide::checkpoint
