// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Disk space for blocks: one unnamed file per folder, striped, reserved before it is used.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deeptide::tiers {

/// Bytes of a block on disk; only the last one of a region may be shorter.
inline constexpr int64_t kSwapBlockBytes = int64_t{4} << 20;

/// The position of a block in a file. Units: bytes.
struct DiskPlace {
  int fd = -1;
  int64_t at = 0;
  int64_t bytes = 0;  // a multiple of io::kAlignment
  const std::string* folder = nullptr;
};

/// The blocks of one buffer, by index.
class DiskRegion {
 public:
  DiskPlace block(int64_t index) const;
  int64_t num_blocks() const { return num_blocks_; }

 private:
  friend class SwapFile;
  struct Stripe {
    int fd = -1;
    int64_t begin = 0;
    const std::string* folder = nullptr;
  };

  std::vector<Stripe> stripes_;  // block i lies in stripe i % stripes
  int64_t num_blocks_ = 0;
  int64_t last_bytes_ = 0;
};

/// The files have no names: however the process ends, the kernel takes their space back.
class SwapFile {
 public:
  /// `folders`: at least one; made if missing. Errors: RuntimeError naming the folder and what failed there.
  explicit SwapFile(std::vector<std::string> folders);
  ~SwapFile();
  SwapFile(const SwapFile&) = delete;

  /// Reserves zeroed space. Errors: RuntimeError naming the folder, the bytes and the kernel's reason (a full disk).
  DiskRegion reserve(int64_t bytes);
  int64_t reserved_bytes() const;
  /// Whether transfers bypass the page cache (O_DIRECT) in every folder.
  bool is_direct() const { return direct_; }
  const std::vector<std::string>& folders() const { return folders_; }

 private:
  std::vector<std::string> folders_;
  std::vector<int> files_;
  std::vector<int64_t> ends_;
  bool direct_ = true;
  size_t next_stripe_ = 0;  // where the next region begins: small regions must not all lie in the first folder
};

}  // namespace deeptide::tiers
