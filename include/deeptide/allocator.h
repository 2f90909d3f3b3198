// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Torch's CPU tensors in large pages that stay: glibc would hand them back to the kernel, or keep them full of holes.
#pragma once

#include <cstdint>

namespace deeptide {

/// Makes torch take its CPU tensors of 256 KiB or more from a heap that keeps their pages. `initialize` calls it unless
/// `deeptide.tune_allocator` is false. For the whole process and until it ends, since tensors outlive engines; calls
/// after the first do nothing. Tensors made before keep their memory. Returns false, and changes nothing, where the
/// program set a CPU allocator of its own before, and under the address and thread sanitizers.
bool install_cpu_allocator();

struct CpuAllocatorStats {
  int64_t in_use_bytes = 0;
  int64_t idle_bytes = 0;  // kept for the next tensors
  int64_t peak_bytes = 0;  // most in use at once
};

/// What the installed allocator holds.
CpuAllocatorStats cpu_allocator_stats();

/// Gives back what it keeps idle, in large pages; destroying an engine does so too.
void release_idle_cpu_memory();

}  // namespace deeptide
