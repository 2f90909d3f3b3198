// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Maps memory files twice, and says what was wrong where the host touches what it must not.
#include "simulated/machine/memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>

namespace deeptide::simulated {
namespace {

constexpr size_t kDeviceAlignment = 512;
constexpr size_t kPage = 4096;
constexpr size_t kReserved = size_t{1} << 36;  // addresses only; pages come when they are touched

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

/// Two views of one memory file, given out by first fit.
class Arena {
 public:
  Arena(const char* name, int shown_protection, size_t alignment) : alignment_(alignment) {
    file_ = ::memfd_create(name, 0);
    if (file_ < 0 || ::ftruncate(file_, kReserved) != 0) throw std::runtime_error("simulated: memfd_create failed");
    shown = map(shown_protection);
    real = map(PROT_READ | PROT_WRITE);
    holes_[0] = kReserved;
  }

  size_t room_for(size_t bytes) const { return std::max(alignment_, round_up(bytes, alignment_)); }
  bool shows(const char* address) const { return address >= shown && address < shown + kReserved; }

  size_t take(size_t bytes) {
    std::lock_guard lock(mutex_);
    for (auto it = holes_.begin(); it != holes_.end(); ++it) {
      const auto [start, length] = *it;
      if (length < bytes) continue;
      holes_.erase(it);
      if (length > bytes) holes_[start + bytes] = length - bytes;
      return start;
    }
    throw OutOfMemory("simulated device: no addresses are left");
  }

  void give(size_t start, size_t bytes) {
    std::lock_guard lock(mutex_);
    auto next = holes_.lower_bound(start);
    if (next != holes_.end() && next->first == start + bytes) {
      bytes += next->second;
      next = holes_.erase(next);
    }
    if (next != holes_.begin()) {
      const auto previous = std::prev(next);
      if (previous->first + previous->second == start) {
        previous->second += bytes;
        return;
      }
    }
    holes_[start] = bytes;
  }

  char* shown = nullptr;
  char* real = nullptr;

 private:
  char* map(int protection) const {
    void* start = ::mmap(nullptr, kReserved, protection, MAP_SHARED | MAP_NORESERVE, file_, 0);
    if (start == MAP_FAILED) throw std::runtime_error("simulated: mmap failed");
    return static_cast<char*>(start);
  }

  const size_t alignment_;
  int file_ = -1;
  std::mutex mutex_;
  std::map<size_t, size_t> holes_;  // offset -> bytes
};

/// Never destroyed: tensors may outlive main.
Arena& arena(Kind kind) {
  static Arena& device = *new Arena("simulated_device", PROT_NONE, kDeviceAlignment);
  static Arena& pinned = *new Arena("simulated_pinned", PROT_READ | PROT_WRITE, kPage);
  return kind == Kind::device ? device : pinned;
}

void explain_fault(int, siginfo_t* info, void*) {
  const auto* address = static_cast<const char*>(info->si_addr);
  const char* what = "segmentation fault";
  if (arena(Kind::device).shows(address)) what = "host code touched memory of the simulated device";
  if (arena(Kind::pinned).shows(address)) what = "host code touched pinned memory that a pending task uses";
  char text[160];
  const int length = std::snprintf(text, sizeof(text), "%s, at %p\n", what, static_cast<const void*>(address));
  if (::write(STDERR_FILENO, text, static_cast<size_t>(length)) < 0) return;
  ::signal(SIGSEGV, SIG_DFL);  // the instruction runs again and ends the process
}

void explain_faults() {
  static const bool installed = [] {
    arena(Kind::device);  // not first in the handler
    struct sigaction action {};
    action.sa_sigaction = &explain_fault;
    action.sa_flags = SA_SIGINFO;
    return ::sigaction(SIGSEGV, &action, nullptr) == 0;
  }();
  if (!installed) throw std::runtime_error("simulated: sigaction failed");
}

}  // namespace

Block::Block(Kind kind_, size_t bytes_, int home_)
    : kind(kind_), bytes(bytes_), room(arena(kind_).room_for(bytes_)), home(home_) {
  explain_faults();
  const size_t offset = arena(kind).take(room);
  shown = arena(kind).shown + offset;
  real = arena(kind).real + offset;
}

Block::~Block() {
  if (guarded_) ::mprotect(shown, room, PROT_READ | PROT_WRITE);
  arena(kind).give(static_cast<size_t>(shown - arena(kind).shown), room);
}

std::string Block::describe() const {
  const char* what = kind == Kind::device ? "device" : kind == Kind::pinned ? "pinned" : "another device's pinned";
  return std::string(what) + " memory of " + std::to_string(bytes) + " bytes";
}

void Block::guard() {
  const auto protect = [&](const Access& access, int protection) {
    const size_t begin = round_up(access.begin, kPage);
    const size_t end = access.end == bytes ? room : access.end / kPage * kPage;
    if (begin < end) ::mprotect(shown + begin, end - begin, protection);
  };
  if (guarded_) ::mprotect(shown, room, PROT_READ | PROT_WRITE);
  for (const Access& access : accesses) {
    if (!access.write) protect(access, PROT_READ);
  }
  for (const Access& access : accesses) {
    if (access.write) protect(access, PROT_NONE);
  }
  guarded_ = !accesses.empty();
}

}  // namespace deeptide::simulated
