// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One block at a time, compiled once per instruction set.
#include "numerics/rounding/quantized.h"

#include <cstring>
#include <limits>
#include <vector>

#include "device/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "numerics/rounding/quantized.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace deeptide::numerics::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Divides half a block.
using BlockLanes = hn::CappedTag<float, static_cast<size_t>(kQuantizedBlock / 2)>;
using BlockInts = hn::RebindToSigned<BlockLanes>;
using BlockV = hn::Vec<BlockLanes>;

inline constexpr auto kBlock = static_cast<size_t>(kQuantizedBlock);

HWY_INLINE hn::Mask<BlockLanes> are_finite(BlockV x) {
  const BlockLanes d;
  return hn::Le(hn::Abs(x), hn::Set(d, std::numeric_limits<float>::max()));
}

HWY_INLINE float largest_finite(const float* values) {
  const BlockLanes d;
  auto largest = hn::Zero(d);
  for (size_t i = 0; i < kBlock; i += hn::Lanes(d)) {
    const auto x = hn::LoadU(d, values + i);
    largest = hn::Max(largest, hn::IfThenElseZero(are_finite(x), hn::Abs(x)));
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

template <int kBits>
HWY_INLINE void quantize_block(const float* values, float* scale, uint8_t* numbers, QuantizationLoss& loss) {
  constexpr auto kMost = static_cast<float>(most_quantized(kBits));
  const BlockLanes d;
  const BlockInts ints;
  const float exact = largest_finite(values) / kMost;
  const bool counts = exact >= std::numeric_limits<float>::min();
  *scale = counts ? exact : 0.0F;
  const auto unit = hn::Set(d, counts ? exact : std::numeric_limits<float>::max());  // large: all are rounded to zero
  const auto marker = hn::Set(ints, static_cast<int>(-most_quantized(kBits) - 1));
  auto lost_squares = hn::Zero(d), squares = hn::Zero(d), most_lost = hn::Zero(d);  // in units of the scale
  const auto round = [&](size_t i) HWY_ATTR {
    const auto x = hn::LoadU(d, values + i);
    const auto finite = are_finite(x);
    const auto ratio = hn::IfThenElseZero(finite, hn::Div(x, unit));
    const auto rounded = hn::NearestInt(ratio);
    const auto rest = hn::Div(hn::Sub(x, hn::Mul(hn::ConvertTo(d, rounded), unit)), unit);
    const auto lost = hn::IfThenElseZero(finite, hn::Abs(rest));
    most_lost = hn::Max(most_lost, lost);
    lost_squares = hn::MulAdd(lost, lost, lost_squares);
    squares = hn::MulAdd(ratio, ratio, squares);
    return hn::IfThenElse(hn::RebindMask(ints, finite), rounded, marker);
  };
  if constexpr (kBits == 8) {
    const hn::Rebind<int8_t, BlockLanes> bytes;
    for (size_t i = 0; i < kBlock; i += hn::Lanes(d)) {
      hn::StoreU(hn::DemoteTo(bytes, round(i)), bytes, reinterpret_cast<int8_t*>(numbers) + i);
    }
  } else {  // a byte has one number of each half
    const hn::Rebind<uint8_t, BlockLanes> pairs;
    const auto nibble = hn::Set(ints, 15);
    for (size_t i = 0; i < kBlock / 2; i += hn::Lanes(d)) {
      const auto low = hn::And(round(i), nibble), high = hn::And(round(kBlock / 2 + i), nibble);
      hn::StoreU(hn::DemoteTo(pairs, hn::Or(low, hn::ShiftLeft<4>(high))), pairs, numbers + i);
    }
  }
  if (!counts) return;
  const double of_unit = static_cast<double>(exact) * exact;
  loss.add({static_cast<double>(hn::GetLane(hn::SumOfLanes(d, lost_squares))) * of_unit,
            static_cast<double>(hn::GetLane(hn::SumOfLanes(d, squares))) * of_unit,
            hn::GetLane(hn::MaxOfLanes(d, most_lost)) / kMost});
}

template <int kBits>
HWY_INLINE void dequantize_block(float scale, const uint8_t* numbers, float* values) {
  const BlockLanes d;
  const BlockInts ints;
  const auto factor = hn::Set(d, scale);
  const auto marker = hn::Set(ints, static_cast<int>(-most_quantized(kBits) - 1));
  const auto put = [&](hn::Vec<BlockInts> number, float* to) HWY_ATTR {
    const auto value = hn::Mul(hn::ConvertTo(d, number), factor);
    const auto is_marked = hn::RebindMask(d, hn::Eq(number, marker));
    hn::StoreU(hn::IfThenElse(is_marked, hn::Set(d, std::numeric_limits<float>::quiet_NaN()), value), d, to);
  };
  if constexpr (kBits == 8) {
    const hn::Rebind<int8_t, BlockLanes> bytes;
    for (size_t i = 0; i < kBlock; i += hn::Lanes(d)) {
      put(hn::PromoteTo(ints, hn::LoadU(bytes, reinterpret_cast<const int8_t*>(numbers) + i)), values + i);
    }
  } else {
    const hn::Rebind<uint8_t, BlockLanes> pairs;
    for (size_t i = 0; i < kBlock / 2; i += hn::Lanes(d)) {
      const auto both = hn::PromoteTo(ints, hn::LoadU(pairs, numbers + i));
      put(hn::ShiftRight<28>(hn::ShiftLeft<28>(both)), values + i);
      put(hn::ShiftRight<28>(hn::ShiftLeft<24>(both)), values + kBlock / 2 + i);
    }
  }
}

/// `count` elements, in whole blocks but for the last.
template <int kBits>
QuantizationLoss quantize_blocks(const float* values, size_t count, float* scales, uint8_t* numbers) {
  constexpr size_t kBytes = kBlock * kBits / 8;
  QuantizationLoss loss;
  for (size_t begin = 0; begin < count; begin += kBlock, ++scales, numbers += kBytes) {
    if (count - begin >= kBlock) {
      quantize_block<kBits>(values + begin, scales, numbers, loss);
      continue;
    }
    float last[kBlock] = {};
    std::memcpy(last, values + begin, (count - begin) * sizeof(float));
    quantize_block<kBits>(last, scales, numbers, loss);
  }
  return loss;
}

template <int kBits>
void dequantize_blocks(const float* scales, const uint8_t* numbers, size_t count, float* values) {
  constexpr size_t kBytes = kBlock * kBits / 8;
  for (size_t begin = 0; begin < count; begin += kBlock, ++scales, numbers += kBytes) {
    if (count - begin >= kBlock) {
      dequantize_block<kBits>(*scales, numbers, values + begin);
      continue;
    }
    float last[kBlock];
    dequantize_block<kBits>(*scales, numbers, last);
    std::memcpy(values + begin, last, (count - begin) * sizeof(float));
  }
}

QuantizationLoss quantize8(const float* values, size_t count, float* scales, uint8_t* numbers) {
  return quantize_blocks<8>(values, count, scales, numbers);
}
QuantizationLoss quantize4(const float* values, size_t count, float* scales, uint8_t* numbers) {
  return quantize_blocks<4>(values, count, scales, numbers);
}
void dequantize8(const float* scales, const uint8_t* numbers, size_t count, float* values) {
  dequantize_blocks<8>(scales, numbers, count, values);
}
void dequantize4(const float* scales, const uint8_t* numbers, size_t count, float* values) {
  dequantize_blocks<4>(scales, numbers, count, values);
}

}  // namespace deeptide::numerics::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::numerics {

HWY_EXPORT(quantize8);
HWY_EXPORT(quantize4);
HWY_EXPORT(dequantize8);
HWY_EXPORT(dequantize4);

namespace {

using at::Tensor;

constexpr int64_t kChunk = 64 * kQuantizedBlock;  // elements whose losses are added up in one order
constexpr int64_t kChunksPerThread = 8;           // 65536 elements read 0.25 MB, which is worth a thread

void check(const char* what, const Tensor& values, int bits, const Tensor& message) {
  const auto fits = [](const Tensor& tensor, at::ScalarType type, int64_t numel) {
    return tensor.defined() && tensor.is_cpu() && tensor.scalar_type() == type && tensor.is_contiguous() &&
           tensor.numel() == numel;
  };
  TORCH_CHECK_VALUE(bits == 4 || bits == 8, what, ": got ", bits, " bits, expected 4 or 8");
  TORCH_CHECK_VALUE(values.defined() && fits(values, at::kFloat, values.numel()), what,
                    ": values must be a contiguous fp32 tensor on the CPU");
  TORCH_CHECK_VALUE(fits(message, at::kByte, quantized_bytes(values.numel(), bits)), what, ": ", values.numel(),
                    " elements of ", bits, " bits take ", quantized_bytes(values.numel(), bits),
                    " bytes (uint8) on the CPU");
}

int64_t blocks_of(int64_t numel) { return (numel + kQuantizedBlock - 1) / kQuantizedBlock; }

/// Calls `kernel(first element, count, first block)` for each chunk, on torch's threads.
template <typename Kernel>
void over_chunks(int64_t numel, const Kernel& kernel) {
  parallel_blocks(numel, kChunk, kChunksPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kChunk) {
      kernel(at, static_cast<size_t>(std::min(kChunk, end - at)), at / kQuantizedBlock);
    }
  });
}

}  // namespace

QuantizationLoss quantize(const Tensor& values, int bits, const Tensor& message) {
  check("quantize", values, bits, message);
  const auto* from = values.const_data_ptr<float>();
  auto* bytes = message.mutable_data_ptr<uint8_t>();
  auto* scales = reinterpret_cast<float*>(bytes);
  uint8_t* numbers = bytes + blocks_of(values.numel()) * static_cast<int64_t>(sizeof(float));
  std::vector<QuantizationLoss> losses(static_cast<size_t>((values.numel() + kChunk - 1) / kChunk));
  over_chunks(values.numel(), [&](int64_t begin, size_t count, int64_t block) {
    uint8_t* to = numbers + block * kQuantizedBlock * bits / 8;
    losses[static_cast<size_t>(begin / kChunk)] =
        bits == 8 ? HWY_DYNAMIC_DISPATCH(quantize8)(from + begin, count, scales + block, to)
                  : HWY_DYNAMIC_DISPATCH(quantize4)(from + begin, count, scales + block, to);
  });
  QuantizationLoss total;
  for (const QuantizationLoss& loss : losses) total.add(loss);
  return total;
}

void dequantize(const Tensor& message, int bits, const Tensor& values) {
  check("dequantize", values, bits, message);
  auto* to = values.mutable_data_ptr<float>();
  const auto* bytes = message.const_data_ptr<uint8_t>();
  const auto* scales = reinterpret_cast<const float*>(bytes);
  const uint8_t* numbers = bytes + blocks_of(values.numel()) * static_cast<int64_t>(sizeof(float));
  over_chunks(values.numel(), [&](int64_t begin, size_t count, int64_t block) {
    const uint8_t* part = numbers + block * kQuantizedBlock * bits / 8;
    bits == 8 ? HWY_DYNAMIC_DISPATCH(dequantize8)(scales + block, part, count, to + begin)
              : HWY_DYNAMIC_DISPATCH(dequantize4)(scales + block, part, count, to + begin);
  });
}

}  // namespace deeptide::numerics
#endif  // HWY_ONCE
