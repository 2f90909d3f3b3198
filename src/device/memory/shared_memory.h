// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Anonymous memory that the processes of one host map together. It has no name: it is freed when the last process ends,
// in whatever way.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace deeptide::device {

/// Size of a plain page, in bytes.
int64_t page_size();

/// A mapped memfd. Pages are taken on first touch, so a generous size costs nothing. Thread-safe. A forked child shares
/// the pages with its parent: it may read and drop them, and what it writes the parent sees.
class SharedMemory : public std::enable_shared_from_this<SharedMemory> {
 public:
  /// Creates zeroed memory. Errors: RuntimeError when the kernel refuses.
  static std::shared_ptr<SharedMemory> create(int64_t bytes);
  /// Maps what another process of this host created; in that process itself returns its object, so that ranks as
  /// threads share one mapping. `address`: its `address()`, valid while it is open there. Errors: RuntimeError when
  /// that process is gone, belongs to another user, or is out of sight (its PID namespace).
  static std::shared_ptr<SharedMemory> open(const std::string& address);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::string address() const;
  char* data() const { return data_; }
  int64_t size() const { return size_; }

  /// A view in which all processes see each other's writes. Shapes: (numel,). Units: offset in bytes. `on_release` runs
  /// when the last reference to the tensor's memory is released.
  at::Tensor view(int64_t offset, int64_t numel, at::ScalarType dtype, std::function<void()> on_release = {});
  /// Takes the pages of a range now, near the calling core. Errors: RuntimeError if there are too few.
  void populate(int64_t offset, int64_t bytes);
  /// Requests large pages for what this process touches first; the kernel's shmem_enabled decides. `offset` is a
  /// multiple of the page size.
  void prefer_large_pages(int64_t offset, int64_t bytes);
  /// Returns the pages of a range to the kernel; all processes then read zeros. Does nothing in a forked child: the
  /// parent still uses the pages.
  void discard(int64_t offset, int64_t bytes);
  int descriptor() const { return fd_; }

 private:
  SharedMemory(int fd, int64_t size);

  int fd_;
  int64_t size_;
  char* data_ = nullptr;
  int mapped_by_;  // process
};

/// A process's own view of a range of shared memory. It reads what is there; its own writes stay private (the kernel
/// copies the page) until `forget`. A forked child has a view of its own, with what its parent had written by then.
class PrivateView : public std::enable_shared_from_this<PrivateView> {
 public:
  /// Units: bytes, 0 allowed; `offset` is a multiple of the page size.
  PrivateView(const std::shared_ptr<SharedMemory>& memory, int64_t offset, int64_t bytes);
  ~PrivateView();
  PrivateView(const PrivateView&) = delete;
  PrivateView& operator=(const PrivateView&) = delete;

  /// Shapes: (numel,); keeps the view alive.
  at::Tensor tensor(int64_t offset, int64_t numel, at::ScalarType dtype);
  /// Calls `visit(begin, end)` for each range of pages that this process has written, in bytes from the view's start.
  /// Stops and returns true once `visit` does. `by_entries`: page by page, as kernels before Linux 6.7 require.
  bool any_written(const std::function<bool(int64_t, int64_t)>& visit, bool by_entries = false) const;
  /// Drops this process's writes: the view shows the shared memory again. Errors: RuntimeError if the process has
  /// locked its memory.
  void forget();

  /// Tries everything on the first page of zeroed `memory`. Errors: RuntimeError if this system does not report which
  /// pages are a process's own (no /proc/self/pagemap, or an uninformative one).
  static void check(const std::shared_ptr<SharedMemory>& memory);

 private:
  std::shared_ptr<SharedMemory> memory_;
  int64_t bytes_;
  char* data_ = nullptr;
};

}  // namespace deeptide::device
