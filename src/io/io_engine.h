// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Transfers a file's blocks, several in flight at a time, by io_uring or by threads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace deeptide::io {

/// One pass over a file.
struct Pass {
  int fd = -1;
  std::string path;           // for errors
  int64_t bytes = 0;          // a multiple of block_bytes
  int64_t block_bytes = 0;    // bytes per request
  bool read = false;          // false: write
  std::vector<void*> blocks;  // one buffer per request in flight
  // Called with the offset before a block is written and after a block was read; concurrently for several blocks.
  std::function<void(size_t buffer, int64_t at)> prepare, inspect;
};

/// Both throw std::system_error naming the file (also on a short transfer), and whatever the callbacks throw.
/// Uses one thread per buffer, with one request at a time in each.
void transfer_by_threads(const Pass& pass);
/// Uses one ring in this thread. Also throws ETIMEDOUT when no request completes for two minutes.
void transfer_by_io_uring(const Pass& pass);

/// Returns why io_uring cannot be used: the kernel's error, or a build without liburing. Empty: it can be used.
std::string io_uring_obstacle();
/// False: built without liburing.
bool has_io_uring();

}  // namespace deeptide::io
