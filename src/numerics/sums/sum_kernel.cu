// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One group of 32 lanes per piece of 4096 elements, as the CPU's vector code has it; then the pieces' sums of squares,
// 1024 at a time. The order of additions depends on nothing but the count: a thread has one lane, or of many pieces
// eight neighbours, whose elements it takes in accesses of 16 bytes.
#include <cmath>

#include "numerics/kernels/kernel_launch.h"
#include "numerics/kernels/kernel_numbers.h"
#include "numerics/kernels/kernel_packets.h"
#include "numerics/sums/sum_kernel.h"

namespace deeptide::numerics::DEEPTIDE_KERNELS {
namespace {

using kernel::NumberType;
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

/// The place of sums.
enum class Into : uint8_t { nowhere, over, onto };  // only squares are wanted; overwriting; adding, in fp32

/// Sums a piece as PieceBody does: `kCount` rows, a power of two, of which each thread takes eight elements at a time.
template <NumberType kRow, int kCount, Into kInto>
struct QuarterBody {
  static_assert(kernel::kQuarter == kernel::kPacket);
  /// Packets whose loads are under way together.
  static constexpr int kTogether = kCount >= 4 ? 1 : 4 / kCount;

  struct Loaded {
    DEEPTIDE_HOST_DEVICE void load(const QuarterBody& body, int64_t i) {
      DEEPTIDE_UNROLLED for (int row = 0; row < kCount; ++row) rows[row].load(body.all.rows.data[row], i);
      if constexpr (kInto == Into::onto) before.load(body.all.accumulator.data, i);
    }
    /// By pairs, as kernel::add_by_pairs.
    template <int kFirst, int kRows>
    DEEPTIDE_HOST_DEVICE float sum(int k) const {
      if constexpr (kRows == 1) {
        return rows[kFirst].value(k);
      } else {
        return sum<kFirst, kRows / 2>(k) + sum<kFirst + kRows / 2, kRows / 2>(k);
      }
    }
    DEEPTIDE_HOST_DEVICE float value(int k, float scale) const {
      const float scaled = sum<0, kCount>(k) * scale;
      if constexpr (kInto == Into::onto) return before.value(k) + scaled;
      return scaled;
    }

    kernel::Packet<kRow> rows[kCount];
    kernel::Packet<NumberType::fp32> before;
  };

  DEEPTIDE_HOST_DEVICE void finish(const Loaded& loaded, int64_t i, double* squares) const {
    kernel::Packet<NumberType::fp32> sums;
    DEEPTIDE_UNROLLED for (int k = 0; k < kernel::kPacket; ++k) {
      const float x = loaded.value(k, all.rows.scale);
      const double value = static_cast<double>(x);
      squares[k] = value * value + squares[k];
      sums.set(k, x);
    }
    if constexpr (kInto != Into::nowhere) sums.store(all.accumulator.data, i);
  }

  DEEPTIDE_HOST_DEVICE void quarter(int64_t piece, int quarter, double* squares) const {
    constexpr int64_t kStride = kernel::kLanes / kernel::kPacket;  // between a thread's packets
    DEEPTIDE_UNROLLED for (int k = 0; k < kernel::kPacket; ++k) squares[k] = 0.0;
    const int64_t begin = piece * SumArguments::kPiece;
    const int64_t end = begin + SumArguments::kPiece < all.count ? begin + SumArguments::kPiece : all.count;
    int64_t i = begin / kernel::kPacket + quarter;
    const int64_t full = end / kernel::kPacket;  // packets from here on are cut, or not the piece's
    for (; i + (kTogether - 1) * kStride < full; i += kTogether * kStride) {
      Loaded loaded[kTogether];
      DEEPTIDE_UNROLLED for (int t = 0; t < kTogether; ++t) loaded[t].load(*this, i + t * kStride);
      DEEPTIDE_UNROLLED for (int t = 0; t < kTogether; ++t) finish(loaded[t], i + t * kStride, squares);
    }
    for (; i < full; i += kStride) {
      Loaded loaded;
      loaded.load(*this, i);
      finish(loaded, i, squares);
    }
    if (i == full) finish_cut(i * kernel::kPacket, end, squares);
  }

  /// Elements [first, end), fewer than eight.
  DEEPTIDE_HOST_DEVICE void finish_cut(int64_t first, int64_t end, double* squares) const {
    DEEPTIDE_UNROLLED for (int k = 0; k < kernel::kPacket; ++k) {
      const int64_t j = first + k;
      if (j >= end) continue;
      float x = cut_sum<0, kCount>(j) * all.rows.scale;
      float* const to = static_cast<float*>(all.accumulator.data);
      if constexpr (kInto == Into::onto) x = to[j] + x;
      if constexpr (kInto != Into::nowhere) to[j] = x;
      squares[k] = static_cast<double>(x) * static_cast<double>(x) + squares[k];
    }
  }
  template <int kFirst, int kRows>
  DEEPTIDE_HOST_DEVICE float cut_sum(int64_t j) const {
    if constexpr (kRows == 1) {
      return kernel::value_of(kernel::load_bits(all.rows.data[kFirst], kRow, j), kRow);
    } else {
      return cut_sum<kFirst, kRows / 2>(j) + cut_sum<kFirst + kRows / 2, kRows / 2>(j);
    }
  }
  DEEPTIDE_HOST_DEVICE void fold(int64_t piece, const double* lanes) const { all.scratch[piece] = added(lanes); }

  SumArguments all;
};

/// Squares of a gradient that lies in pieces, as QuarterBody takes those of one row: the same bits.
template <NumberType kRow>
struct PiecesBody {
  static constexpr int kTogether = 4;  // packets whose loads are under way together

  DEEPTIDE_HOST_DEVICE void quarter(int64_t block, int quarter, double* squares) const {
    constexpr int64_t kStride = kernel::kLanes / kernel::kPacket;  // between a thread's packets
    DEEPTIDE_UNROLLED for (int k = 0; k < kernel::kPacket; ++k) squares[k] = 0.0;
    const int64_t begin = block * SumArguments::kPiece;
    const int64_t end = begin + SumArguments::kPiece < all.count ? begin + SumArguments::kPiece : all.count;
    kernel::PieceReader<kRow> reader{all.pieces};
    int64_t i = begin / kernel::kPacket + quarter;
    const int64_t last = (end + kernel::kPacket - 1) / kernel::kPacket;
    for (; i + (kTogether - 1) * kStride < last; i += kTogether * kStride) {
      kernel::Packet<kRow> packets[kTogether];
      DEEPTIDE_UNROLLED for (int t = 0; t < kTogether; ++t) reader.load(packets[t], i + t * kStride);
      DEEPTIDE_UNROLLED for (int t = 0; t < kTogether; ++t) add(packets[t], squares);
    }
    for (; i < last; i += kStride) {
      kernel::Packet<kRow> packet;
      reader.load(packet, i);
      add(packet, squares);
    }
  }
  DEEPTIDE_HOST_DEVICE void add(const kernel::Packet<kRow>& packet, double* squares) const {
    DEEPTIDE_UNROLLED for (int k = 0; k < kernel::kPacket; ++k) {
      const double value = static_cast<double>(packet.value(k) * all.pieces.scale);
      squares[k] = value * value + squares[k];
    }
  }
  DEEPTIDE_HOST_DEVICE void fold(int64_t block, const double* lanes) const { all.scratch[block] = added(lanes); }

  SumArguments all;
};

/// Pieces from which on four threads each keep a GPU of 130 multiprocessors busy.
#ifdef DEEPTIDE_ON_DEVICE
constexpr int64_t kFewestInQuarters = 130 * kernel::kWideGroups;
#else
constexpr int64_t kFewestInQuarters = 1;
#endif

/// Launches the pieces' sums.
struct Launch {
  bool takes_quarters() const {
    const kernel::Rows& rows = all.rows;
    bool may =
        pieces >= kFewestInQuarters && (rows.count == 1 || rows.count == 2 || rows.count == 4 || rows.count == 8);
    for (int row = 0; may && row < rows.count; ++row) may = kernel::is_aligned(rows.data[row]);
    return may && kernel::is_aligned(all.accumulator.data) &&
           (all.accumulator.data == nullptr || all.accumulator.type == NumberType::fp32);
  }
  template <NumberType kRow, int kCount>
  void run() const {
    if (all.accumulator.data == nullptr) {
      kernel::launch_quarters(stream, pieces, QuarterBody<kRow, kCount, Into::nowhere>{all});
    } else if (all.overwrite) {
      kernel::launch_quarters(stream, pieces, QuarterBody<kRow, kCount, Into::over>{all});
    } else {
      kernel::launch_quarters(stream, pieces, QuarterBody<kRow, kCount, Into::onto>{all});
    }
  }
  template <NumberType kRow>
  void run() const {
    if (all.rows.count == 1) return run<kRow, 1>();
    if (all.rows.count == 2) return run<kRow, 2>();
    all.rows.count == 4 ? run<kRow, 4>() : run<kRow, 8>();
  }
  template <NumberType kRow>
  void run_pieces() const {
    kernel::launch_quarters(stream, pieces, PiecesBody<kRow>{all});
  }
  void operator()() const {
    if (all.pieces.pieces > 0) {
      if (all.pieces.type == NumberType::fp32) return run_pieces<NumberType::fp32>();
      return all.pieces.type == NumberType::bf16 ? run_pieces<NumberType::bf16>() : run_pieces<NumberType::fp16>();
    }
    if (!takes_quarters()) return kernel::launch_groups(stream, pieces, PieceBody{all});
    if (all.rows.type == NumberType::fp32) return run<NumberType::fp32>();
    all.rows.type == NumberType::bf16 ? run<NumberType::bf16>() : run<NumberType::fp16>();
  }

  const SumArguments& all;
  int64_t pieces;
  void* stream;
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
  Launch{arguments, count, stream}();
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
