// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Anonymous memory that the processes of one host map together. It has no name anywhere: when the last of them ends, in
// whatever way, it is gone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace deeptide::device {

/// Of plain pages, in bytes.
int64_t page_size();

/// A memfd, mapped. Pages are taken when they are first touched, so a generous size costs nothing. Thread-safe.
class SharedMemory : public std::enable_shared_from_this<SharedMemory> {
 public:
  /// Zeroed. Errors: RuntimeError when the kernel refuses.
  static std::shared_ptr<SharedMemory> create(int64_t bytes);
  /// Maps what another process of this host has created; in that process itself it is the same object, so that ranks
  /// as threads share one mapping. `address`: its `address()`, while it has not closed it. Errors: RuntimeError when
  /// that process is gone, of another user, or out of sight (its PID namespace).
  static std::shared_ptr<SharedMemory> open(const std::string& address);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::string address() const;
  char* data() const { return data_; }
  int64_t size() const { return size_; }

  /// Everybody's: what is written here all see. Shapes: (numel,). Units: offset in bytes. `on_release` runs when the
  /// last reference to the tensor's memory goes.
  at::Tensor view(int64_t offset, int64_t numel, at::ScalarType dtype, std::function<void()> on_release = {});
  /// Takes the pages of a range now, near the core that calls. Errors: RuntimeError when there are not so many.
  void populate(int64_t offset, int64_t bytes);
  /// A wish, for what this process touches first: it is granted where the kernel's shmem_enabled says so. `offset`: a
  /// multiple of the page size.
  void prefer_large_pages(int64_t offset, int64_t bytes);
  /// Gives the pages of a range back to the kernel; it reads as zeros afterwards, for all. Not in a forked child: what
  /// it lets go of is still its parent's.
  void discard(int64_t offset, int64_t bytes);
  int descriptor() const { return fd_; }

 private:
  SharedMemory(int fd, int64_t size);

  int fd_;
  int64_t size_;
  char* data_ = nullptr;
  int mapped_by_;  // process
};

/// A process's own view of a range of shared memory: it reads what is there, and what it writes itself only it sees
/// (the kernel copies the page then), until `forget`.
class PrivateView : public std::enable_shared_from_this<PrivateView> {
 public:
  /// Units: bytes, 0 among them; `offset` a multiple of the page size.
  PrivateView(const std::shared_ptr<SharedMemory>& memory, int64_t offset, int64_t bytes);
  ~PrivateView();
  PrivateView(const PrivateView&) = delete;
  PrivateView& operator=(const PrivateView&) = delete;

  /// Shapes: (numel,); keeps the view alive.
  at::Tensor tensor(int64_t offset, int64_t numel, at::ScalarType dtype);
  /// Calls `visit(begin, end)` for each range of pages that this process has written, in bytes from the view's start;
  /// stops and returns true when `visit` does. `by_entries`: as kernels before Linux 6.7 tell it, page by page.
  bool any_written(const std::function<bool(int64_t, int64_t)>& visit, bool by_entries = false) const;
  /// Drops what this process has written: the view shows the shared memory again. Errors: RuntimeError where the
  /// process has locked its memory.
  void forget();

  /// Tries it all on the first page of zeroed `memory`. Errors: RuntimeError when this system does not tell which pages
  /// are a process's own (no /proc/self/pagemap, or one that says nothing).
  static void check(const std::shared_ptr<SharedMemory>& memory);

 private:
  std::shared_ptr<SharedMemory> memory_;
  int64_t bytes_;
  char* data_ = nullptr;
};

}  // namespace deeptide::device
