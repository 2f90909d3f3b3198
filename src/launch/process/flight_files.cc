// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Uses memfds, which have no name in any file system and vanish with the last process that holds them.
#include "launch/process/flight_files.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <new>
#include <numeric>
#include <system_error>
#include <utility>

#include "world/mesh.h"

namespace deeptide::launch {
namespace {

int make_file(const char* name, off_t bytes) {
  const int fd = ::memfd_create(name, MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, bytes) != 0) throw std::system_error(errno, std::generic_category(), name);
  return fd;
}

}  // namespace

std::string place_in(const std::array<int, 5>& mesh, int rank) {
  if (mesh.front() == 0) return "";
  const int ranks = std::accumulate(mesh.begin(), mesh.end(), 1, std::multiplies<>());
  return world::Mesh(ranks, mesh).place(rank);
}

std::array<int, 5> FlightFiles::mesh() const {
  std::array<int, 5> sizes{};
  for (size_t axis = 0; axis < sizes.size(); ++axis) sizes[axis] = ring_->mesh.sizes[axis].load();
  return sizes;
}

FlightFiles::FlightFiles() {
  ring_fd_ = make_file("deeptide-flight", sizeof(trace::FlightRing));
  stacks_fd_ = make_file("deeptide-stacks", 0);
  void* memory = ::mmap(nullptr, sizeof(trace::FlightRing), PROT_READ | PROT_WRITE, MAP_SHARED, ring_fd_, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "deeptide-flight");
  ring_ = new (memory) trace::FlightRing;
  ring_->magic.store(trace::kFlightMagic);
}

FlightFiles::~FlightFiles() {
  if (ring_ != nullptr) ::munmap(ring_, sizeof(trace::FlightRing));
  if (ring_fd_ >= 0) ::close(ring_fd_);
  if (stacks_fd_ >= 0) ::close(stacks_fd_);
}

FlightFiles::FlightFiles(FlightFiles&& other) noexcept
    : ring_fd_(std::exchange(other.ring_fd_, -1)),
      stacks_fd_(std::exchange(other.stacks_fd_, -1)),
      ring_(std::exchange(other.ring_, nullptr)) {}

std::map<std::string, std::string> FlightFiles::environment() const {
  return {{trace::kFlightVariable, std::to_string(ring_fd_)}, {trace::kStacksVariable, std::to_string(stacks_fd_)}};
}

std::string FlightFiles::stacks() const {
  struct stat status {};
  if (::fstat(stacks_fd_, &status) != 0) return "";
  std::string text(static_cast<size_t>(status.st_size), '\0');
  const ssize_t got = ::pread(stacks_fd_, text.data(), text.size(), 0);
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  return text;
}

void FlightFiles::watch(double seconds) const {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  const int64_t now_ns = now.tv_sec * 1'000'000'000LL + now.tv_nsec;
  ring_->wish.watched_until_ns.store(now_ns + static_cast<int64_t>(seconds * 1e9), std::memory_order_relaxed);
}

void FlightFiles::ask_timeline(uint64_t number, int64_t num_steps, const std::string& folder) const {
  trace::FlightWish& wish = ring_->wish;
  folder.copy(wish.trace_folder, sizeof wish.trace_folder - 1);
  wish.trace_folder[std::min(folder.size(), sizeof wish.trace_folder - 1)] = '\0';
  wish.trace_steps.store(num_steps, std::memory_order_relaxed);
  wish.trace_number.store(number, std::memory_order_release);
}

void FlightFiles::clear_stacks() const {
  // Rewind: the rank shares the offset and writes at it.
  if (::ftruncate(stacks_fd_, 0) == 0) ::lseek(stacks_fd_, 0, SEEK_SET);
}

}  // namespace deeptide::launch
