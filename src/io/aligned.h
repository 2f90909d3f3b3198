// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Memory and positions that O_DIRECT takes.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "io/queue.h"

namespace deeptide::io {

inline int64_t align_down(int64_t bytes) { return bytes / kAlignment * kAlignment; }
inline int64_t align_up(int64_t bytes) { return align_down(bytes + kAlignment - 1); }

struct FreeAligned {
  void operator()(char* memory) const { std::free(memory); }
};
using AlignedMemory = std::unique_ptr<char, FreeAligned>;

/// Errors: std::bad_alloc.
inline AlignedMemory allocate_aligned(int64_t bytes) {
  AlignedMemory memory(static_cast<char*>(std::aligned_alloc(kAlignment, static_cast<size_t>(align_up(bytes)))));
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace deeptide::io
