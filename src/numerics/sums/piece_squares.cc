// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sixteen fp64 lanes a block. The square of a float is exact in fp64, so every instruction set gives the same sums.
#include "numerics/sums/piece_squares.h"

#include <algorithm>

#include "numerics/sums/ordered_sum.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "numerics/sums/piece_squares.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace deeptide::numerics::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Element i goes to lane i % 16; `count` is a multiple of 16.
void add_squares(const float* values, int64_t count, double* lanes) {
  constexpr int64_t kLanes = 16;
  const hn::CappedTag<double, kLanes> d64;
  const hn::Rebind<float, decltype(d64)> d32;
  const auto width = static_cast<int64_t>(hn::Lanes(d64));
  for (int64_t lane = 0; lane < kLanes; lane += width) {
    auto sum = hn::LoadU(d64, lanes + lane);
    for (int64_t i = lane; i < count; i += kLanes) {
      const auto value = hn::PromoteTo(d64, hn::LoadU(d32, values + i));
      sum = hn::MulAdd(value, value, sum);
    }
    hn::StoreU(sum, d64, lanes + lane);
  }
}

}  // namespace deeptide::numerics::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::numerics {

HWY_EXPORT(add_squares);

PieceSquares::PieceSquares(int64_t numel) : blocks_((numel + kBlock - 1) / kBlock) {
  for (auto& lanes : blocks_) lanes.fill(0.0);
}

void PieceSquares::add(int64_t begin, const float* values, int64_t count) {
  if (count == 0) return;
  auto& lanes = blocks_.at(begin / kBlock);
  const auto add_one = [&](int64_t index, float value) {
    lanes[index % kLanes] += static_cast<double>(value) * static_cast<double>(value);
  };
  const int64_t head = std::min((kLanes - begin % kLanes) % kLanes, count);
  for (int64_t i = 0; i < head; ++i) add_one(begin + i, values[i]);
  const int64_t body = (count - head) / kLanes * kLanes;
  HWY_DYNAMIC_DISPATCH(add_squares)(values + head, body, lanes.data());
  for (int64_t i = head + body; i < count; ++i) add_one(begin + i, values[i]);
}

void PieceSquares::add(int64_t begin, const at::Tensor& values) {
  if (values.numel() == 0) return;
  if (!values.is_cpu()) {
    const at::Tensor sum = values.new_empty({1}, at::kDouble);
    ordered_squares(values, sum);
    on_device_.push_back(sum.squeeze(0));
    return;
  }
  const float* data = values.const_data_ptr<float>();
  const int64_t end = begin + values.numel();
  for (int64_t first = begin; first < end;) {
    const int64_t last = std::min((first / kBlock + 1) * kBlock, end);
    add(first, data + (first - begin), last - first);
    first = last;
  }
}

double PieceSquares::total() const {
  double total = 0.0;
  for (const auto& lanes : blocks_) {
    for (const double lane : lanes) total += lane;
  }
  for (const at::Tensor& sum : on_device_) total += sum.item<double>();
  return total;
}

}  // namespace deeptide::numerics
#endif  // HWY_ONCE
