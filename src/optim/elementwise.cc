// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts a segment into ranges of streams, one per thread, or one per block where rows must be summed first.
#include "optim/elementwise.h"

#include <ATen/ops/mul.h>

#include <algorithm>

#include "device/parallel.h"
#include "numerics/piece_squares.h"
#include "numerics/rounding.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/elementwise.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace deeptide::optim::HWY_NAMESPACE {
const char* target_name() { return hwy::TargetName(HWY_TARGET); }
}  // namespace deeptide::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::optim {

HWY_EXPORT(target_name);

const char* kernel_target() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

namespace detail {
namespace {

using at::Tensor;

constexpr int64_t kBlock = numerics::SumReader::kBlock;  // a multiple of every vector's width
constexpr int64_t kGrainBlocks = 8;                      // 32768 elements move about 1 MB: worth a thread

/// From element `begin` on, a multiple of kBlock.
ParamStream param_stream(const Tensor& param, int64_t begin) {
  constexpr size_t kLarge = 1 << 20;  // bytes
  constexpr size_t kVector = 64;
  if (!param.defined()) return {nullptr, Output::none, false};
  auto* data = static_cast<uint16_t*>(param.mutable_data_ptr()) + begin;
  const bool aligned = reinterpret_cast<uintptr_t>(data) % kVector == 0;
  const bool bf16 = param.scalar_type() == at::kBFloat16;
  return {data, bf16 ? Output::bf16 : Output::fp16, aligned && param.nbytes() >= kLarge};
}

/// What vector code reads by itself: a pass through the cache costs a tenth more.
Source source_of(const Segment& segment) {
  const auto& rows = segment.gradient.rows;
  const bool bf16 =
      segment.param.defined() && segment.param.scalar_type() == at::kBFloat16 && rows[0].scalar_type() == at::kBFloat16;
  if (!bf16 || rows.size() > 2) return Source::summed;
  return rows.size() == 1 ? Source::one_bf16 : Source::two_bf16;
}

Streams streams_at(const Segment& segment, int64_t begin, const GradientStreams& gradient) {
  Streams io{segment.master.mutable_data_ptr<float>() + begin, {}, gradient, param_stream(segment.param, begin)};
  for (size_t i = 0; i < segment.states.size(); ++i) {
    const Tensor& state = segment.states[i];
    io.states[i] = state.defined() ? state.mutable_data_ptr<float>() + begin : nullptr;
  }
  return io;
}

/// What a range of a segment needs in fp32 to be stepped: 20 KiB, which stay in the first-level cache.
struct WideBlock {
  static constexpr int64_t kNumel = 1024;
  HWY_ALIGN float gradient[kNumel];
  HWY_ALIGN float master[kNumel];
  HWY_ALIGN float states[kMaxStates][kNumel];
};

/// The segment's streams from element `begin` on, with what has 16 bits as copies in `wide`. The new master needs no
/// copy back: the kernel writes it as it writes a rounded parameter.
Streams widened_streams(const Segment& segment, int64_t begin, int64_t count, WideBlock& wide) {
  const at::ScalarType type = segment.master.scalar_type();
  auto* master = static_cast<uint16_t*>(segment.master.mutable_data_ptr()) + begin;
  numerics::widen(master, type, count, wide.master);
  Streams io{wide.master, {}, {}, {master, type == at::kHalf ? Output::fp16 : Output::bf16, /*past_cache=*/false}};
  for (size_t i = 0; i < segment.states.size(); ++i) {
    const Tensor& state = segment.states[i];
    if (!state.defined()) continue;
    if (state.scalar_type() == at::kFloat) {
      io.states[i] = state.mutable_data_ptr<float>() + begin;
    } else {
      io.states[i] = wide.states[i];
      numerics::widen(static_cast<const uint16_t*>(state.const_data_ptr()) + begin, type, count, io.states[i]);
    }
  }
  return io;
}

void round_states(const Segment& segment, int64_t begin, int64_t count, const WideBlock& wide) {
  for (size_t i = 0; i < segment.states.size(); ++i) {
    const Tensor& state = segment.states[i];
    if (!state.defined() || state.scalar_type() == at::kFloat) continue;
    numerics::round_to(static_cast<uint16_t*>(state.mutable_data_ptr()) + begin, state.scalar_type(), count,
                       wide.states[i]);
  }
}

/// As over_streams, with a master of 16 bits.
void over_widened(const Segment& segment, const StepTerms& terms,
                  c10::function_ref<void(const Streams& streams, size_t count)> kernel) {
  const numerics::SumReader reader(segment.gradient);
  parallel_blocks(segment.master.numel(), kBlock, kGrainBlocks, [&](int64_t begin, int64_t end) {
    WideBlock wide;
    for (int64_t first = begin; first < end; first += WideBlock::kNumel) {
      const int64_t count = std::min(WideBlock::kNumel, end - first);
      Streams io = widened_streams(segment, first, count, wide);
      io.gradient = {{reader.read(first, count, wide.gradient), nullptr},
                     1.0f,
                     static_cast<float>(terms.gradient_scale),
                     Source::summed};
      kernel(io, static_cast<size_t>(count));
      round_states(segment, first, count, wide);
    }
  });
}

}  // namespace

void over_streams(const Segment& segment, const StepTerms& terms,
                  c10::function_ref<void(const Streams& streams, size_t count)> kernel) {
  if (numerics::is_half_width(segment.master.scalar_type())) return over_widened(segment, terms, kernel);
  const auto& contributions = segment.gradient;
  const Source source = source_of(segment);
  GradientStreams gradient{{}, 1.0f, static_cast<float>(terms.gradient_scale), source};
  if (source != Source::summed) {
    gradient.row_scale = static_cast<float>(contributions.scale);
    parallel_blocks(segment.master.numel(), kBlock, kGrainBlocks, [&](int64_t begin, int64_t end) {
      GradientStreams own = gradient;
      for (size_t row = 0; row < contributions.rows.size(); ++row) {
        own.rows[row] = static_cast<const uint16_t*>(contributions.rows[row].const_data_ptr()) + begin;
      }
      kernel(streams_at(segment, begin, own), static_cast<size_t>(end - begin));
    });
    return;
  }
  // Rows that are not summed yet pass through a block in the cache.
  const numerics::SumReader reader(contributions);
  parallel_blocks(segment.master.numel(), kBlock, kGrainBlocks, [&](int64_t begin, int64_t end) {
    HWY_ALIGN float scratch[kBlock];
    const int64_t length = contributions.is_summed() ? end - begin : kBlock;
    GradientStreams own = gradient;
    for (int64_t first = begin; first < end; first += length) {
      const int64_t count = std::min(length, end - first);
      own.rows[0] = reader.read(first, count, scratch);
      kernel(streams_at(segment, first, own), static_cast<size_t>(count));
    }
  });
}

Streams streams_from(const Segment& segment, int64_t begin) {
  return streams_at(segment, begin, {{}, 1.0f, 1.0f, Source::summed});
}

void over_states(const Segment& segment, c10::function_ref<void(const Streams& streams, size_t count)> kernel) {
  parallel_blocks(segment.master.numel(), kBlock, kGrainBlocks, [&](int64_t begin, int64_t end) {
    kernel(streams_from(segment, begin), static_cast<size_t>(end - begin));
  });
}

void over_blocks(const Segment& segment, int64_t first,
                 c10::function_ref<void(int64_t begin, int64_t count, const float* gradient)> visit) {
  constexpr int64_t kSquares = numerics::PieceSquares::kBlock;
  static_assert(kSquares % kBlock == 0);
  const int64_t numel = segment.master.numel();
  const int64_t origin = first / kSquares * kSquares;  // of the block of squares in which the segment begins
  const numerics::SumReader reader(segment.gradient);
  parallel_blocks(first - origin + numel, kSquares, /*grain=*/1, [&](int64_t from, int64_t to) {
    HWY_ALIGN float scratch[kBlock];
    int64_t begin = std::max<int64_t>(origin + from - first, 0);
    const int64_t end = origin + to - first;
    while (begin < end) {
      const int64_t next_block = ((first + begin) / kBlock + 1) * kBlock - first;
      const int64_t count = std::min(next_block, end) - begin;
      visit(begin, count, reader.read(begin, count, scratch));
      begin += count;
    }
  });
}

Tensor scaled_gradient(const Segment& segment, const StepTerms& terms, float l2_decay) {
  Tensor gradient = at::mul(segment.gradient.sum(), static_cast<float>(terms.gradient_scale));
  if (l2_decay != 0.0f) gradient.add_(segment.master, l2_decay);
  return gradient;
}

}  // namespace detail
}  // namespace deeptide::optim
#endif  // HWY_ONCE
