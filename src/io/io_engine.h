// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How a file's blocks reach its device, several under way at a time: by io_uring, or by threads.
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
  int64_t block_bytes = 0;    // of one request
  bool read = false;          // else write
  std::vector<void*> blocks;  // a buffer for each request that may be under way
  // Called before a block is written and after it was read, with its place in the file; for several at a time.
  std::function<void(size_t buffer, int64_t at)> prepare, inspect;
};

/// Errors, of both: std::system_error naming the file; also for a transfer that is short. And what the callbacks throw.
/// A thread for each buffer, one request at a time in each.
void transfer_by_threads(const Pass& pass);
/// One ring; this thread alone. Also ETIMEDOUT when no request ends for two minutes.
void transfer_by_io_uring(const Pass& pass);

/// Why io_uring cannot be used: the kernel's words, or that this build has no liburing. Empty: it can.
std::string io_uring_obstacle();
/// False: built without liburing.
bool has_io_uring();

}  // namespace deeptide::io
