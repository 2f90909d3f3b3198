// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Memory and positions that O_DIRECT takes.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "base/resources.h"
#include "io/queue.h"

namespace deeptide::io {

inline int64_t align_down(int64_t bytes) { return bytes / kAlignment * kAlignment; }
inline int64_t align_up(int64_t bytes) { return align_down(bytes + kAlignment - 1); }

struct FreeAligned {
  void operator()(char* memory) const { std::free(memory); }
};
using AlignedMemory = std::unique_ptr<char, FreeAligned>;

/// Null where the system has no more to give, not even once it got back what lay idle.
inline AlignedMemory try_aligned(int64_t bytes) {
  char* memory = nullptr;
  take_or_give_back([&] {
    memory = static_cast<char*>(std::aligned_alloc(kAlignment, static_cast<size_t>(align_up(bytes))));
    return memory != nullptr;
  });
  return AlignedMemory(memory);
}

/// `bytes`, or about a half, a quarter and so on, which is put there, down to `least`; both are aligned. Null as
/// above.
inline AlignedMemory allocate_aligned(int64_t& bytes, int64_t least) {
  for (int64_t size = bytes; size >= least; size = align_down(size / 2)) {
    if (AlignedMemory memory = try_aligned(size)) {
      bytes = size;
      return memory;
    }
  }
  return nullptr;
}

}  // namespace deeptide::io
