// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How fast a folder's device writes and reads, past the page cache.
#pragma once

#include <cstdint>
#include <string>

namespace deeptide::launch {

enum class IoEngine : uint8_t { automatic, io_uring, threads };

struct IoBench {
  std::string folder = ".";
  IoEngine engine = IoEngine::automatic;  // io_uring where it may be used, else threads
  int64_t io_bytes = 400 << 20;           // of each file
  int64_t block_bytes = 1 << 20;          // of one request
  int num_files = 4;                      // at the same time
  int queue_depth = 32;                   // requests under way in each of them
  int num_loops = 3;
  bool read = false;
  bool validate = false;  // of a read: what was written comes back
  bool direct = true;     // O_DIRECT; false: through the page cache
};

struct IoResult {
  double best_s = 0.0;  // of one loop over all files; of a write, with fsync
  int64_t bytes = 0;    // of one loop
  bool direct = true;   // false: not asked for, or the file system has no O_DIRECT; the page cache flatters the figure
  IoEngine engine = IoEngine::threads;
  std::string obstacle;  // why io_uring was not used; empty: it was, or was not wanted

  double gb_per_s() const { return static_cast<double>(bytes) / best_s * 1e-9; }
};

/// Writes the files (and reads them back, for `read`), removes them again.
/// Errors: UsageError if sizes do not divide or the engine cannot be used; std::system_error naming the file.
IoResult run_io_bench(const IoBench& bench);

/// "400M", "1G", "4096" in bytes. Errors: UsageError.
int64_t parse_size(const std::string& text);

}  // namespace deeptide::launch
