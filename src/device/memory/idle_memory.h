// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gives idle memory up for whoever is refused memory: this process's own, then that of the machine's other ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <list>

namespace deeptide::device {

/// From now on no thread changes the allocator's heap while another one forks: the child would inherit it half changed.
void watch_forks();

/// Gives the kernel what the installed allocator's heap keeps idle. Returns whether there was any.
bool release_idle_heap();

/// Asks others, with whom this process shares a limit, to give back theirs. Returns whether any has answered. Holds no
/// lock that an allocation needs, takes no memory of torch's allocator, and throws nothing.
using AskOthers = std::function<bool()>;

/// While it lives, who lacks memory asks through `ask`. A call that has begun may end after it. A forked child may
/// leave it or destroy it.
class Asking {
 public:
  explicit Asking(AskOthers ask);
  ~Asking();
  Asking(const Asking&) = delete;

 private:
  std::list<AskOthers>::iterator place_;
};

/// Calls all that `Asking` has registered. Returns whether any has answered.
bool release_idle_of_others();

/// Calls `take`, which returns whether it got its memory: as things are, then without this process's idle memory, then
/// without that of others. Returns what the last call returned.
template <typename Take>
bool take_before_idle(const Take& take) {
  return take() || (release_idle_heap() && take()) || (release_idle_of_others() && take());
}

/// Lets idle memory go where the control groups of this process allow less than `bytes` more: beyond a limit the kernel
/// refuses nothing, it kills. Call it before memory is mapped, without the heap's lock.
void make_room(int64_t bytes) noexcept;

}  // namespace deeptide::device
