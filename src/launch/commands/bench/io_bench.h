// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Measures the speed of writes and reads to a folder's device, past the page cache.
#pragma once

#include <cstdint>
#include <string>

namespace deeptide::launch {

enum class IoEngine : uint8_t { automatic, io_uring, threads };

struct IoBench {
  std::string folder = ".";
  IoEngine engine = IoEngine::automatic;  // io_uring if available, else threads
  int64_t io_bytes = 400 << 20;           // per file
  int64_t block_bytes = 1 << 20;          // per request
  int num_files = 4;                      // in parallel
  int queue_depth = 32;                   // requests in flight per file
  int num_loops = 3;
  bool read = false;
  bool validate = false;  // compares the data read with the data written
  bool direct = true;     // O_DIRECT; false: through the page cache
};

struct IoResult {
  double best_s = 0.0;  // one loop over all files; for a write, with fsync
  int64_t bytes = 0;    // per loop
  bool direct = true;   // false: not requested, or no O_DIRECT in the file system; the page cache inflates the figure
  IoEngine engine = IoEngine::threads;
  std::string obstacle;  // why io_uring was not used; empty: it was used or not requested

  double gb_per_s() const { return static_cast<double>(bytes) / best_s * 1e-9; }
};

/// Writes the files, for `read` reads them back, and removes them.
/// Errors: UsageError if the sizes do not divide or the engine is not available; std::system_error naming the file.
IoResult run_io_bench(const IoBench& bench);

/// Parses "400M", "1G" or "4096". Returns bytes. Errors: UsageError.
int64_t parse_size(const std::string& text);

}  // namespace deeptide::launch
