// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One thread per element of all pairs together.
#include "numerics/kernels/copy_kernel.h"
#include "numerics/kernels/kernel_launch.h"
#include "numerics/kernels/kernel_numbers.h"

namespace deeptide::numerics::DEEPTIDE_KERNELS {
namespace {

struct CopyBody {
  /// The pair to which element `i` belongs: the last that begins at or before it. Empty pairs hold none.
  DEEPTIDE_HOST_DEVICE int pair_of(int64_t i) const {
    int low = 0, high = all.pairs;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (all.begin[middle] <= i ? low : high) = middle;
    }
    return low;
  }
  DEEPTIDE_HOST_DEVICE void operator()(int64_t i) const {
    const int pair = pair_of(i);
    const int64_t own = i - all.begin[pair];
    const kernel::Numbers &from = all.from[pair], &to = all.to[pair];
    const uint32_t bits = kernel::load_bits(from.data, from.type, own);
    if (from.type == to.type) {
      kernel::store_bits(bits, to, own);  // a NaN keeps its bits
    } else {
      kernel::store(kernel::value_of(bits, from.type), to, own);
    }
  }

  kernel::CopyArguments all;
};

}  // namespace

bool has_copy() { return kernel::is_runnable<CopyBody>(); }

void copy(const kernel::CopyArguments& arguments, void* stream) {
  kernel::launch_each(stream, arguments.begin[arguments.pairs], CopyBody{arguments});
}

}  // namespace deeptide::numerics::DEEPTIDE_KERNELS
