// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How fast a folder's device writes and reads, past the page cache.
#pragma once

#include <cstdint>
#include <string>

namespace deeptide::launch {

struct IoBench {
  std::string folder = ".";
  int64_t io_bytes = 400 << 20;   // of each thread's file
  int64_t block_bytes = 1 << 20;  // of one request
  int num_threads = 4;            // requests under way: one a thread
  int num_loops = 3;
  bool read = false;
  bool validate = false;  // of a read: what was written comes back
};

struct IoResult {
  double best_s = 0.0;  // of one loop over all files; of a write, with fsync
  int64_t bytes = 0;    // of one loop
  bool direct = true;   // false: the file system has no O_DIRECT, the page cache flatters the figure

  double gb_per_s() const { return static_cast<double>(bytes) / best_s * 1e-9; }
};

/// Writes a file for each thread (and reads them back, for `read`), removes them again.
/// Errors: UsageError if sizes do not divide; std::system_error naming the file.
IoResult run_io_bench(const IoBench& bench);

/// "400M", "1G", "4096" in bytes. Errors: UsageError.
int64_t parse_size(const std::string& text);

}  // namespace deeptide::launch
