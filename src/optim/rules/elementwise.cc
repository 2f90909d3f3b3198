// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts a segment into ranges of streams, one per thread, or one per block where rows must be summed first.
#include "optim/rules/elementwise.h"

#include <algorithm>

#include "device/parallel.h"
#include "numerics/rounding/rounding.h"
#include "numerics/sums/piece_squares.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/rules/elementwise.cc"
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

/// Returns the form in which vector code reads: a pass through the cache costs a tenth more.
Source source_of(const Segment& segment) {
  const auto& rows = segment.gradient.rows;
  const bool to_bf16 =
      segment.low.defined() || (segment.param.defined() && segment.param.scalar_type() == at::kBFloat16);
  if (!to_bf16 || rows[0].scalar_type() != at::kBFloat16 || rows.size() > 2) return Source::summed;
  return rows.size() == 1 ? Source::one_bf16 : Source::two_bf16;
}

Streams streams_at(const Segment& segment, int64_t begin, const GradientStreams& gradient) {
  Streams io{nullptr, {}, gradient, param_stream(segment.param, begin)};
  if (segment.low.defined()) {
    io.packed = segment.packed().from(begin);
  } else {
    io.master = segment.master.mutable_data_ptr<float>() + begin;
  }
  for (size_t i = 0; i < segment.states.size(); ++i) {
    const Tensor& state = segment.states[i];
    if (!state.defined()) continue;
    if (state.scalar_type() == at::kFloat) {
      io.states[i] = state.mutable_data_ptr<float>() + begin;
    } else {
      io.half_states[i] = static_cast<uint16_t*>(state.mutable_data_ptr()) + begin;
    }
  }
  if (segment.rounding) io.index = segment.rounding->first + begin;
  return io;
}

/// Whether parts of the segment are widened in the cache: a packed master and what is beside it are not.
bool needs_widening(const Segment& segment) {
  if (segment.low.defined()) return false;
  const auto is_narrow = [](const Tensor& tensor) { return tensor.defined() && tensor.scalar_type() != at::kFloat; };
  return is_narrow(segment.master) || std::any_of(segment.states.begin(), segment.states.end(), is_narrow);
}

/// The fp32 scratch of a step over a range of a segment: 20 KiB, which stay in the first-level cache.
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
  Streams io{};
  if (type == at::kFloat) {
    io = {segment.master.mutable_data_ptr<float>() + begin, {}, {}, param_stream(segment.param, begin)};
    io.param.past_cache = false;
  } else {
    auto* master = static_cast<uint16_t*>(segment.master.mutable_data_ptr()) + begin;
    numerics::widen(master, type, count, wide.master);
    io = {wide.master, {}, {}, {master, type == at::kHalf ? Output::fp16 : Output::bf16, /*past_cache=*/false}};
  }
  for (size_t i = 0; i < segment.states.size(); ++i) {
    const Tensor& state = segment.states[i];
    if (!state.defined()) continue;
    if (state.scalar_type() == at::kFloat) {
      io.states[i] = state.mutable_data_ptr<float>() + begin;
    } else {
      io.states[i] = wide.states[i];
      numerics::widen(static_cast<const uint16_t*>(state.const_data_ptr()) + begin, state.scalar_type(), count,
                      io.states[i]);
    }
  }
  return io;
}

void round_states(const Segment& segment, int64_t begin, int64_t count, const WideBlock& wide,
                  const numerics::RandomKey& random) {
  int stream = 0;
  for (size_t i = 0; i < segment.states.size(); ++i) {
    const Tensor& state = segment.states[i];
    if (!state.defined()) continue;
    const int own = stream++;
    if (state.scalar_type() == at::kFloat) continue;
    auto* to = static_cast<uint16_t*>(state.mutable_data_ptr()) + begin;
    if (segment.rounding) {
      numerics::round_stochastically(wide.states[i], count, to, random, own, segment.rounding->first + begin);
    } else {
      numerics::round_to(to, state.scalar_type(), count, wide.states[i]);
    }
  }
}

numerics::RandomKey random_of(const Segment& segment, const StepTerms& terms) {
  if (!segment.rounding) return {};
  return numerics::RandomKey::of(segment.rounding->seed, static_cast<uint64_t>(terms.step));
}

/// Does as over_streams with a master or states of 16 bits.
void over_widened(const Segment& segment, const StepTerms& terms,
                  c10::function_ref<void(const Streams& streams, size_t count)> kernel) {
  const numerics::SumReader reader(segment.gradient);
  const numerics::RandomKey random = random_of(segment, terms);
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
      round_states(segment, first, count, wide, random);
    }
  });
}

}  // namespace

void over_streams(const Segment& segment, const StepTerms& terms,
                  c10::function_ref<void(const Streams& streams, size_t count)> kernel) {
  if (needs_widening(segment)) return over_widened(segment, terms, kernel);
  const auto& contributions = segment.gradient;
  const Source source = source_of(segment);
  GradientStreams gradient{{}, 1.0f, static_cast<float>(terms.gradient_scale), source};
  const numerics::RandomKey random = random_of(segment, terms);
  const auto run = [&](int64_t begin, int64_t end, const GradientStreams& own) {
    Streams io = streams_at(segment, begin, own);
    io.random = random;
    kernel(io, static_cast<size_t>(end - begin));
  };
  if (source != Source::summed) {
    gradient.row_scale = static_cast<float>(contributions.scale);
    parallel_blocks(segment.master.numel(), kBlock, kGrainBlocks, [&](int64_t begin, int64_t end) {
      GradientStreams own = gradient;
      for (size_t row = 0; row < contributions.rows.size(); ++row) {
        own.rows[row] = static_cast<const uint16_t*>(contributions.rows[row].const_data_ptr()) + begin;
      }
      run(begin, end, own);
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
      run(first, first + count, own);
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
  Tensor gradient = segment.gradient.sum().mul(static_cast<float>(terms.gradient_scale));
  if (l2_decay != 0.0f) gradient.add_(segment.master, l2_decay);
  return gradient;
}

}  // namespace detail
}  // namespace deeptide::optim
#endif  // HWY_ONCE
