// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One group of 32 lanes per piece of 4096 elements, as the CPU's vector code has it; then the pieces' sums of squares,
// 1024 at a time. The order of additions depends on nothing but the count.
#include <cmath>

#include "numerics/kernel_launch.h"
#include "numerics/kernel_numbers.h"
#include "numerics/sum_kernel.h"

namespace deeptide::numerics::DEEPTIDE_KERNELS {
namespace {

using kernel::SumArguments;

/// lanes[0] + lanes[1] + …, in that order.
DEEPTIDE_HOST_DEVICE double added(const double* lanes) {
  double total = 0.0;
  for (int lane = 0; lane < kernel::kLanes; ++lane) total = total + lanes[lane];
  return total;
}

/// A lane's elements whose loads are under way together: one at a time would leave most of the memory's bandwidth
/// unused.
constexpr int kTogether = 8;

/// Every 32nd element from `first` on, at most kTogether, below `end`.
struct Batch {
  DEEPTIDE_HOST_DEVICE int64_t index(int k) const { return first + static_cast<int64_t>(k) * kernel::kLanes; }
  DEEPTIDE_HOST_DEVICE bool has(int k) const { return index(k) < end; }
  DEEPTIDE_HOST_DEVICE void load(const void* data, kernel::NumberType type, float* values) const {
    uint32_t bits[kTogether];
    for (int k = 0; k < kTogether; ++k) bits[k] = has(k) ? kernel::load_bits(data, type, index(k)) : 0;
    for (int k = 0; k < kTogether; ++k) values[k] = kernel::value_of(bits[k], type);
  }

  int64_t first;
  int64_t end;
};

/// Sums one piece's rows and its squares.
struct PieceBody {
  /// Does as kernel::sum_of for a batch.
  DEEPTIDE_HOST_DEVICE void sum_rows(const Batch& batch, float* sums) const {
    const auto load = [&](int row, float* values) { batch.load(all.rows.data[row], all.rows.type, values); };
    kernel::add_by_pairs<kTogether>(all.rows.count, load, sums);
    for (int k = 0; k < kTogether; ++k) sums[k] = sums[k] * all.rows.scale;
  }
  /// Adds to the accumulator and leaves its new values in `sums`, whose squares are taken.
  DEEPTIDE_HOST_DEVICE void accumulate(const Batch& batch, float* sums) const {
    const kernel::Numbers& to = all.accumulator;
    float before[kTogether];
    if (!all.overwrite) batch.load(to.data, to.type, before);
    for (int k = 0; k < kTogether; ++k) {
      if (!all.overwrite) sums[k] = before[k] + sums[k];
      if (batch.has(k)) sums[k] = kernel::store(sums[k], to, batch.index(k));
    }
  }
  DEEPTIDE_HOST_DEVICE double lane(int64_t piece, int lane) const {
    const int64_t begin = piece * SumArguments::kPiece;
    const int64_t end = begin + SumArguments::kPiece < all.count ? begin + SumArguments::kPiece : all.count;
    double squares = 0.0;
    for (int64_t i = begin + lane; i < end; i += kTogether * kernel::kLanes) {
      const Batch batch{i, end};
      float sums[kTogether];
      sum_rows(batch, sums);
      if (all.accumulator.data != nullptr) accumulate(batch, sums);
      for (int k = 0; k < kTogether; ++k) {
        const double value = batch.has(k) ? static_cast<double>(sums[k]) : 0.0;
        squares = value * value + squares;  // a float's square is exact: fused or not, the same
      }
    }
    return squares;
  }
  DEEPTIDE_HOST_DEVICE void fold(int64_t piece, const double* lanes) const { all.scratch[piece] = added(lanes); }

  SumArguments all;
};

/// Adds the sums of 1024 pieces, or of as many such sums. The last of them goes to the total.
struct LevelBody {
  DEEPTIDE_HOST_DEVICE double lane(int64_t group, int lane) const {
    const int64_t begin = group * SumArguments::kPieces;
    const int64_t end = begin + SumArguments::kPieces < count ? begin + SumArguments::kPieces : count;
    double sum = 0.0;
    for (int64_t i = begin + lane; i < end; i += kernel::kLanes) sum = sum + from[i];
    return sum;
  }
  DEEPTIDE_HOST_DEVICE void fold(int64_t group, const double* lanes) const {
    if (total != nullptr) {
      *total = *total + added(lanes);
    } else {
      to[group] = added(lanes);
    }
  }

  const double* from;
  int64_t count;
  double* to;
  double* total;
};

struct Nothing {
  DEEPTIDE_HOST_DEVICE void operator()(int64_t /*i*/) const {}
};

}  // namespace

bool has_sum() { return kernel::is_runnable<Nothing>(); }

void sum(const SumArguments& arguments, void* stream) {
  int64_t count = (arguments.count + SumArguments::kPiece - 1) / SumArguments::kPiece;
  if (count == 0) return;
  kernel::launch_groups(stream, count, PieceBody{arguments});
  double* from = arguments.scratch;
  while (count > 0) {
    const int64_t groups = (count + SumArguments::kPieces - 1) / SumArguments::kPieces;
    double* to = from + count;
    kernel::launch_groups(stream, groups, LevelBody{from, count, to, groups == 1 ? arguments.sum_of_squares : nullptr});
    from = to;
    count = groups == 1 ? 0 : groups;
  }
}

}  // namespace deeptide::numerics::DEEPTIDE_KERNELS
