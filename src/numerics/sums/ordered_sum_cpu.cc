// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The ordered sum as one pass of vector code over memory, block by block, compiled once per instruction set.
#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <vector>

#include "device/parallel.h"
#include "numerics/rounding/rounding.h"
#include "numerics/sums/ordered_sum.h"
#include "numerics/sums/ordered_sum_detail.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "numerics/sums/ordered_sum_cpu.cc"
// Arrays of vectors below: no targets whose vectors have no size at compile time.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include <hwy/aligned_allocator.h>
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "numerics/rounding/float_vectors-inl.h"

#ifndef DEEPTIDE_ORDERED_SUM_CPU_ONCE
#define DEEPTIDE_ORDERED_SUM_CPU_ONCE
namespace deeptide::numerics::detail {

constexpr int64_t kBlock = SumReader::kBlock;
constexpr size_t kSquareLanes = 32;  // element i of a block belongs to lane i % 32

constexpr int64_t kFewRows = 4;  // that one pass adds

/// Rows are added by pairs: of `count`, the first so many, a power of two, then the others, then both sums.
inline int64_t first_half(int64_t count) {
  int64_t first = 1;
  while (2 * first < count) first *= 2;
  return first;
}

/// Blocks that hold the second halves' sums while they are formed.
inline int64_t scratch_blocks(int64_t num_rows) {
  int64_t blocks = 0;
  for (int64_t rows = 2 * kFewRows; rows < num_rows; rows *= 2) ++blocks;
  return blocks;
}

struct Rows {
  const void* const* data;  // a row each
  at::ScalarType dtype;
  int64_t count;
};

/// The use of the accumulator: written (a large one past the cache, which would not hold it until it is read),
/// added to, or left alone, when only the squares are wanted.
enum class Sink : uint8_t { overwrite, overwrite_past_cache, add, none };

struct Finish {
  float scale;
  Sink sink;
};

}  // namespace deeptide::numerics::detail
#endif

HWY_BEFORE_NAMESPACE();
namespace deeptide::numerics::detail::HWY_NAMESPACE {
using namespace numerics::HWY_NAMESPACE;

/// sum = (kCarry ? sum : 0) + the rows.
template <int kRows, bool kCarry, class T>
void write_sum(const T* const* rows, float* sum, size_t count) {
  each_vector(0, count, [&](auto part, size_t i) { part.put(add_rows<kRows, kCarry>(part, rows, sum, i), sum + i); });
}

/// Sums of squares, lane by lane. A float's square is exact in double, so only the order of the additions rounds:
/// within a lane, then lane 0 to 31.
class Squares {
 public:
  static constexpr size_t kVectors = kSquareLanes / HWY_LANES(float);

  HWY_INLINE Squares() {
    for (auto& vector : sums_) vector = hn::Zero(D64());
  }
  /// Elements i to i + kSquareLanes.
  HWY_INLINE void add(const V* values) {
    for (size_t k = 0; k < kVectors; ++k) add(k, values[k]);
  }
  /// Elements i + k * lanes to i + (k + 1) * lanes of a group of kSquareLanes.
  HWY_INLINE void add(size_t k, V value) {
#if HWY_TARGET == HWY_SCALAR
    add_to(k, hn::PromoteTo(D64(), value));
#else
    const hn::Half<D> half;
    add_to(2 * k, hn::PromoteTo(D64(), hn::LowerHalf(half, value)));
    add_to(2 * k + 1, hn::PromoteTo(D64(), hn::UpperHalf(half, value)));
#endif
  }
  HWY_INLINE double total() const {
    HWY_ALIGN double lanes[kSquareLanes];
    for (size_t k = 0; k < kVectors64; ++k) hn::Store(sums_[k], D64(), lanes + k * HWY_LANES(double));
    double total = 0.0;
    for (double lane : lanes) total += lane;
    return total;
  }

 private:
  using D64 = hn::ScalableTag<double>;
  using V64 = hn::Vec<D64>;
  static constexpr size_t kVectors64 = kSquareLanes / HWY_LANES(double);

  HWY_INLINE void add_to(size_t k, V64 value) { sums_[k] = hn::MulAdd(value, value, sums_[k]); }

  V64 sums_[kVectors64];
};

/// accumulator = (add: accumulator +) scale * the rows' sum; returns the sum of its squares.
template <int kRows, Sink kSink, class T>
double finish_rows(const T* const* rows, float scale, float* accumulator, size_t count) {
  constexpr size_t kLanes = HWY_LANES(float);
  const size_t whole = count - count % kSquareLanes;
  const auto finished = [&](auto part, size_t i) {
    const V sum = hn::Mul(add_rows<kRows, false>(part, rows, nullptr, i), hn::Set(D(), scale));
    if constexpr (kSink == Sink::add) return hn::Add(part.get(accumulator + i), sum);
    return sum;
  };
  Squares squares;
  for (size_t i = 0; i < whole; i += kSquareLanes) {
    V values[Squares::kVectors];
    for (size_t k = 0; k < Squares::kVectors; ++k) {
      const size_t j = i + k * kLanes;
      for (int row = 0; row < kRows; ++row) fetch_ahead(rows[row] + j);
      if constexpr (kSink == Sink::add) fetch_ahead(accumulator + j);
      values[k] = finished(Whole(), j);
      if constexpr (kSink == Sink::overwrite_past_cache) stream(values[k], accumulator + j);
      if constexpr (kSink == Sink::overwrite || kSink == Sink::add) store(values[k], accumulator + j);
    }
    squares.add(values);
  }
  Squares all = squares;  // a copy: the tail's index would keep the loop's sums out of registers
  each_vector(whole, count, [&](auto part, size_t i) {
    const V value = finished(part, i);
    if constexpr (kSink != Sink::none) part.put(value, accumulator + i);
    all.add((i - whole) / kLanes, part.keep(value));
  });
  return all.total();
}

template <int kRows, class T>
double finish_rows(const T* const* rows, const Finish& finish, float* accumulator, size_t count) {
  switch (finish.sink) {
    case Sink::overwrite:
      return finish_rows<kRows, Sink::overwrite>(rows, finish.scale, accumulator, count);
    case Sink::overwrite_past_cache:
      return finish_rows<kRows, Sink::overwrite_past_cache>(rows, finish.scale, accumulator, count);
    case Sink::add:
      return finish_rows<kRows, Sink::add>(rows, finish.scale, accumulator, count);
    default:
      return finish_rows<kRows, Sink::none>(rows, finish.scale, accumulator, count);
  }
}

/// sum = (kCarry ? sum : 0) + at most four rows.
template <bool kCarry, class T>
void write_few(const T* const* rows, int64_t num_rows, float* sum, size_t count) {
  switch (num_rows) {
    case 1:
      return write_sum<1, kCarry>(rows, sum, count);
    case 2:
      return write_sum<2, kCarry>(rows, sum, count);
    case 3:
      return write_sum<3, kCarry>(rows, sum, count);
    default:
      return write_sum<4, kCarry>(rows, sum, count);
  }
}

/// sum = the rows' sum by pairs. `scratch`: scratch_blocks(num_rows) blocks. Four rows a pass: few enough streams for
/// the prefetchers.
template <class T>
void write_pairs(const T* const* rows, int64_t num_rows, float* sum, float* scratch, size_t count) {
  if (num_rows <= kFewRows) return write_few<false>(rows, num_rows, sum, count);
  const int64_t first = first_half(num_rows), rest = num_rows - first;
  write_pairs(rows, first, sum, scratch, count);
  if (rest <= kFewRows) return write_few<true>(rows + first, rest, sum, count);
  write_pairs(rows + first, rest, scratch, scratch + kBlock, count);
  const float* second[] = {scratch};
  write_sum<1, true>(second, sum, count);
}

/// Does as write_pairs, with scratch of its own.
template <class T>
void write_rows(const T* const* rows, int64_t num_rows, float* sum, size_t count) {
  const int64_t blocks = scratch_blocks(num_rows);
  const auto scratch = blocks > 0 ? hwy::AllocateAligned<float>(static_cast<size_t>(blocks * kBlock)) : nullptr;
  write_pairs(rows, num_rows, sum, scratch.get(), count);
}

/// Beyond four rows the sum grows in the first-level cache.
template <class T>
double finish_many_rows(const T* const* rows, int64_t num_rows, const Finish& finish, float* accumulator,
                        size_t count) {
  HWY_ALIGN float sum[kBlock];
  write_rows(rows, num_rows, sum, count);
  const float* summed[] = {sum};
  return finish_rows<1>(summed, finish, accumulator, count);
}

/// The rows from element `begin` on.
template <class T>
class RowsFrom {
 public:
  RowsFrom(const Rows& rows, int64_t begin) : many_(rows.count > kFew ? rows.count : 0) {
    data_ = rows.count > kFew ? many_.data() : few_;
    for (int64_t row = 0; row < rows.count; ++row) data_[row] = static_cast<const T*>(rows.data[row]) + begin;
  }
  RowsFrom(const RowsFrom&) = delete;
  const T* const* get() const { return data_; }

 private:
  static constexpr int64_t kFew = 64;
  const T* few_[kFew];
  std::vector<const T*> many_;
  const T** data_;
};

template <class T>
double reduce_typed(const Rows& shape, int64_t begin, size_t count, const Finish& finish, float* accumulator) {
  const RowsFrom<T> from(shape, begin);
  const T* const* rows = from.get();
  switch (shape.count) {
    case 1:
      return finish_rows<1>(rows, finish, accumulator, count);
    case 2:
      return finish_rows<2>(rows, finish, accumulator, count);
    case 3:
      return finish_rows<3>(rows, finish, accumulator, count);
    case 4:
      return finish_rows<4>(rows, finish, accumulator, count);
    default:
      return finish_many_rows(rows, shape.count, finish, accumulator, count);
  }
}

double reduce_block(const Rows& rows, int64_t begin, size_t count, const Finish& finish, float* accumulator) {
  if (rows.dtype == at::kFloat) return reduce_typed<float>(rows, begin, count, finish, accumulator);
  if (rows.dtype == at::kHalf) return reduce_typed<c10::Half>(rows, begin, count, finish, accumulator);
  return reduce_typed<c10::BFloat16>(rows, begin, count, finish, accumulator);
}

/// sum = scale * the rows' sum, rounding as `finish_rows` does.
template <class T>
void sum_typed(const Rows& shape, int64_t begin, size_t count, float scale, float* sum) {
  const RowsFrom<T> rows(shape, begin);
  write_rows(rows.get(), shape.count, sum, count);
  if (scale == 1.0f) return;
  each_vector(0, count,
              [&](auto part, size_t i) { part.put(hn::Mul(part.get(sum + i), hn::Set(D(), scale)), sum + i); });
}

void sum_block(const Rows& rows, int64_t begin, size_t count, float scale, float* sum) {
  if (rows.dtype == at::kFloat) return sum_typed<float>(rows, begin, count, scale, sum);
  if (rows.dtype == at::kHalf) return sum_typed<c10::Half>(rows, begin, count, scale, sum);
  sum_typed<c10::BFloat16>(rows, begin, count, scale, sum);
}

template <class T>
void add_widened_typed(const void* from, int64_t begin, size_t count, float* accumulator) {
  const T* rows[] = {static_cast<const T*>(from) + begin};
  write_sum<1, true>(rows, accumulator + begin, count);
}

void add_widened(const void* from, at::ScalarType dtype, int64_t begin, size_t count, float* accumulator) {
  if (dtype == at::kHalf) {
    add_widened_typed<c10::Half>(from, begin, count, accumulator);
  } else {
    add_widened_typed<c10::BFloat16>(from, begin, count, accumulator);
  }
}

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace deeptide::numerics::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::numerics::detail {
namespace {

HWY_EXPORT(reduce_block);
HWY_EXPORT(sum_block);
HWY_EXPORT(add_widened);
HWY_EXPORT(target_name);

constexpr int64_t kGrainBlocks = 8;

std::vector<const void*> pointers(at::TensorList tensors) {
  std::vector<const void*> data;
  for (const at::Tensor& tensor : tensors) data.push_back(tensor.const_data_ptr());
  return data;
}

void sum(const Rows& rows, int64_t begin, size_t count, float scale, float* out) {
  HWY_DYNAMIC_DISPATCH(sum_block)(rows, begin, count, scale, out);
}

Sink sink_of(const float* accumulator, int64_t numel) {
  constexpr int64_t kLarge = 1 << 20;  // elements: 4 MiB
  constexpr uintptr_t kVector = 64;
  const bool aligned = reinterpret_cast<uintptr_t>(accumulator) % kVector == 0;
  return aligned && numel >= kLarge ? Sink::overwrite_past_cache : Sink::overwrite;
}

void add_in_order(const std::vector<double>& partial, const at::Tensor& total) {
  double& sum = *total.mutable_data_ptr<double>();
  for (const double block : partial) sum += block;
}

/// Adds the blocks' sums of squares to `squares`, in order. `out`: null if the sums are not needed.
void reduce_blocks(at::TensorList tensors, const Finish& finish, float* out, const at::Tensor& squares) {
  const auto data = pointers(tensors);
  const Rows rows{data.data(), tensors[0].scalar_type(), static_cast<int64_t>(data.size())};
  const int64_t numel = tensors[0].numel();
  std::vector<double> partial(static_cast<size_t>((numel + kBlock - 1) / kBlock));
  parallel_blocks(numel, kBlock, kGrainBlocks, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kBlock) {
      const size_t count = static_cast<size_t>(std::min(kBlock, end - at));
      float* block = out ? out + at : nullptr;
      partial[static_cast<size_t>(at / kBlock)] = HWY_DYNAMIC_DISPATCH(reduce_block)(rows, at, count, finish, block);
    }
    if (finish.sink == Sink::overwrite_past_cache) hwy::FlushStream();
  });
  add_in_order(partial, squares);
}

/// With an accumulator of 16 bits: blocks pass through the cache in fp32, and what is stored of each is read again for
/// its squares.
void reduce_rounded(at::TensorList tensors, float scale, bool overwrite, const at::Tensor& accumulator,
                    const at::Tensor& sum_of_squares) {
  const auto data = pointers(tensors);
  const Rows rows{data.data(), tensors[0].scalar_type(), static_cast<int64_t>(data.size())};
  const at::ScalarType dtype = accumulator.scalar_type();
  auto* out = static_cast<uint16_t*>(accumulator.mutable_data_ptr());
  const void* const stored_data[] = {out};
  const Rows stored{stored_data, dtype, 1};
  const Finish sum{scale, overwrite ? Sink::overwrite : Sink::add}, squares{1.0f, Sink::none};
  const int64_t numel = accumulator.numel();
  std::vector<double> partial(static_cast<size_t>((numel + kBlock - 1) / kBlock));
  parallel_blocks(numel, kBlock, kGrainBlocks, [&](int64_t begin, int64_t end) {
    HWY_ALIGN float wide[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t count = std::min(kBlock, end - at);
      const auto length = static_cast<size_t>(count);
      if (!overwrite) widen(out + at, dtype, count, wide);
      HWY_DYNAMIC_DISPATCH(reduce_block)(rows, at, length, sum, wide);
      round_to(out + at, dtype, count, wide);
      partial[static_cast<size_t>(at / kBlock)] =
          HWY_DYNAMIC_DISPATCH(reduce_block)(stored, at, length, squares, nullptr);
    }
  });
  add_in_order(partial, sum_of_squares);
}

}  // namespace

const char* chosen_target() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

void ordered_sum_cpu(at::TensorList rows, float scale, bool overwrite, const at::Tensor& accumulator,
                     const at::Tensor& sum_of_squares) {
  if (is_half_width(accumulator.scalar_type())) {
    reduce_rounded(rows, scale, overwrite, accumulator, sum_of_squares);
    return;
  }
  float* out = accumulator.mutable_data_ptr<float>();
  const Finish finish{scale, overwrite ? sink_of(out, accumulator.numel()) : Sink::add};
  reduce_blocks(rows, finish, out, sum_of_squares);
}

void ordered_squares_cpu(at::TensorList rows, float scale, const at::Tensor& sum_of_squares) {
  reduce_blocks(rows, {scale, Sink::none}, nullptr, sum_of_squares);
}

void accumulate_cpu(const at::Tensor& gradient, const at::Tensor& accumulator) {
  float* out = accumulator.mutable_data_ptr<float>();
  parallel_blocks(accumulator.numel(), kBlock, kGrainBlocks, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(add_widened)
    (gradient.const_data_ptr(), gradient.scalar_type(), begin, static_cast<size_t>(end - begin), out);
  });
}

}  // namespace deeptide::numerics::detail

namespace deeptide::numerics {

SumReader::SumReader(const Contributions& contributions)
    : rows_(detail::pointers(contributions.rows)),
      dtype_(contributions.rows[0].scalar_type()),
      scale_(static_cast<float>(contributions.scale)),
      summed_(contributions.is_summed()) {}

const float* SumReader::read(int64_t begin, int64_t count, float* scratch) const {
  if (summed_) return static_cast<const float*>(rows_[0]) + begin;
  const detail::Rows rows{rows_.data(), dtype_, static_cast<int64_t>(rows_.size())};
  detail::sum(rows, begin, static_cast<size_t>(count), scale_, scratch);
  return scratch;
}

}  // namespace deeptide::numerics
#endif
