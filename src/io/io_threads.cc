// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Uses pread and pwrite; of n threads, each takes every n-th block.
#include <unistd.h>

#include <cerrno>
#include <future>
#include <system_error>

#include "io/io_engine.h"

namespace deeptide::io {
namespace {

void transfer_share(const Pass& pass, size_t buffer) {
  void* const block = pass.blocks[buffer];
  const auto stride = static_cast<int64_t>(pass.blocks.size()) * pass.block_bytes;
  for (int64_t at = static_cast<int64_t>(buffer) * pass.block_bytes; at < pass.bytes; at += stride) {
    if (!pass.read) pass.prepare(buffer, at);
    const ssize_t done =
        pass.read ? ::pread(pass.fd, block, pass.block_bytes, at) : ::pwrite(pass.fd, block, pass.block_bytes, at);
    if (done != pass.block_bytes) throw std::system_error(done < 0 ? errno : EIO, std::generic_category(), pass.path);
    if (pass.read) pass.inspect(buffer, at);
  }
}

}  // namespace

void transfer_by_threads(const Pass& pass) {
  std::vector<std::future<void>> threads;
  for (size_t buffer = 0; buffer < pass.blocks.size(); ++buffer) {
    try {
      threads.push_back(std::async(std::launch::async, transfer_share, std::cref(pass), buffer));
    } catch (const std::system_error&) {  // the system has no more threads to give: this one does their work
      threads.push_back(std::async(std::launch::deferred, transfer_share, std::cref(pass), buffer));
    }
  }
  for (auto& thread : threads) thread.wait();
  for (auto& thread : threads) thread.get();
}

}  // namespace deeptide::io
