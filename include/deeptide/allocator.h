// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps torch's CPU tensors in large pages: glibc would return those to the kernel, or leave them full of holes.
#pragma once

#include <cstdint>

#include "deeptide/export.h"

namespace deeptide {

/// Makes torch allocate CPU tensors of 256 KiB or more from a heap that keeps their pages. `initialize` calls it unless
/// `deeptide.tune_allocator` is false. Lasts until the process ends, since tensors outlive engines; later calls do
/// nothing. Earlier tensors keep their memory. Returns false, and changes nothing, if the program has set a CPU
/// allocator of its own, and under the address and thread sanitizers.
DEEPTIDE_API bool install_cpu_allocator();

struct CpuAllocatorStats {
  int64_t in_use_bytes = 0;
  int64_t idle_bytes = 0;  // kept in memory for the next tensors
  int64_t peak_bytes = 0;  // most in use at once
};

/// Reports what the installed allocator holds.
DEEPTIDE_API CpuAllocatorStats cpu_allocator_stats();

/// Returns idle memory to the kernel, in large pages; destroying an engine does so too.
DEEPTIDE_API void release_idle_cpu_memory();

}  // namespace deeptide
