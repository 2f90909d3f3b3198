// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Splits a range of elements over torch's own intra-operator threads.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>
#include <c10/util/FunctionRef.h>
#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace deeptide {

/// Number of cores that this process may use.
inline int num_cores() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

/// While it lives, `parallel_blocks` stays on this thread; RAII.
class RunInline {
 public:
  RunInline() : before_(std::exchange(active(), true)) {}
  ~RunInline() { active() = before_; }
  RunInline(const RunInline&) = delete;
  static bool& active() {
    static thread_local bool active = false;
    return active;
  }

 private:
  bool before_;
};

/// Calls `work(begin, end)` over disjoint ranges that cover [0, numel); inner bounds are multiples of `block` elements.
/// Gives a thread at least about `grain` blocks; honours torch.set_num_threads, runs inline inside a parallel region.
inline void parallel_blocks(int64_t numel, int64_t block, int64_t grain,
                            c10::function_ref<void(int64_t, int64_t)> work) {
  const int64_t num_blocks = (numel + block - 1) / block;
  if (num_blocks <= grain || RunInline::active()) {
    if (numel > 0) work(0, numel);
    return;
  }
  // at::parallel_for is serial in code compiled without OpenMP, and with it may add a second pool of threads to
  // torch's. An iterator runs on the pool that torch was built with.
  const at::TensorBase ticks = at::detail::empty_cpu({num_blocks}, at::kByte);
  const char* first = static_cast<const char*>(ticks.const_data_ptr());
  at::TensorIterator iterator = at::TensorIterator::borrowing_nullary_op(ticks);
  iterator.for_each(
      [&](char** data, const int64_t*, int64_t count, int64_t) {
        const int64_t begin = data[0] - first;
        work(begin * block, std::min(numel, (begin + count) * block));
      },
      grain);
}

}  // namespace deeptide
