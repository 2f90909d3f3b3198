// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Copies CPU memory without displacing the caches' contents.
#pragma once

#include <cstddef>

namespace deeptide::device {

/// memcpy with stores past the cache. A line that is written whole need not be read first, which saves a third of the
/// traffic of a copy that no cache holds. Other threads see the copy before this thread's next stores.
void copy_past_cache(void* to, const void* from, size_t bytes);

/// memcpy on torch's threads, from a few MiB on: one core alone does not reach the memory's bandwidth.
void copy_in_parallel(void* to, const void* from, size_t bytes);

}  // namespace deeptide::device
