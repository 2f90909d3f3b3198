// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The optimizer steps as one pass of vector code, compiled once per instruction set and chosen at run time.
#include <ATen/core/Tensor.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "device/parallel.h"
#include "optim/kernels_detail.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels_cpu.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "numerics/float_vectors-inl.h"

#ifndef DEEPTIDE_OPTIM_KERNELS_CPU_ONCE
#define DEEPTIDE_OPTIM_KERNELS_CPU_ONCE
namespace deeptide::optim::detail {

enum class Output : uint8_t { none, bf16, fp16 };

/// How a step's gradient comes: summed, in fp32, or as one or two rows of bf16 that are summed as they are read.
enum class Source : uint8_t { summed, one_bf16, two_bf16 };

struct GradientStreams {
  static constexpr int kMaxRows = 2;
  const void* rows[kMaxRows];
  float scale;  // of the rows' sum
  Source source;
};

/// Where the rounded master goes; null in fp32 training. Large ones go past the cache: they are not read before all of
/// the model has been written, and a line that is not cached need not be read to be written.
struct ParamStream {
  uint16_t* data;
  bool past_cache;
};

/// A step's streams from some element on. SGD's `momentum` is null when there is none.
struct AdamStreams {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  GradientStreams gradient;
  ParamStream param;
};

struct SgdStreams {
  float* master;
  float* momentum;
  const float* gradient;
  ParamStream param;
};

}  // namespace deeptide::optim::detail
#endif

HWY_BEFORE_NAMESPACE();
namespace deeptide::optim::detail::HWY_NAMESPACE {
using namespace numerics::HWY_NAMESPACE;

template <Source kSource>
inline constexpr int kRowsOf = kSource == Source::two_bf16 ? 2 : 1;
template <Source kSource>
using RowType = std::conditional_t<kSource == Source::summed, float, c10::BFloat16>;

template <Source kSource>
HWY_INLINE V load_gradient(const GradientStreams& gradient, size_t i) {
  using T = RowType<kSource>;
  if constexpr (kSource == Source::summed) return load(static_cast<const T*>(gradient.rows[0]) + i);
  const T* from[] = {static_cast<const T*>(gradient.rows[0]), static_cast<const T*>(gradient.rows[1])};
  return hn::Mul(add_rows<kRowsOf<kSource>, false>(Whole(), from, nullptr, i), hn::Set(D(), gradient.scale));
}

template <Output kOutput>
HWY_INLINE void store_param(V x, const ParamStream& param, size_t i) {
  if constexpr (kOutput == Output::fp16) store(x, reinterpret_cast<c10::Half*>(param.data) + i);
  if constexpr (kOutput == Output::bf16) {
    auto* to = reinterpret_cast<c10::BFloat16*>(param.data) + i;
    param.past_cache ? stream(x, to) : store(x, to);
  }
}

template <Output kOutput, bool kL2, Source kSource>
HWY_INLINE void adam_vector(const AdamStreams& io, size_t i, const AdamScalars& s) {
  const D d;
  V p = hn::LoadU(d, io.master + i);
  V g = hn::Mul(load_gradient<kSource>(io.gradient, i), hn::Set(d, s.gradient_scale));
  if constexpr (kL2) g = hn::MulAdd(hn::Set(d, s.l2_decay), p, g);
  p = hn::Mul(p, hn::Set(d, s.keep));

  // torch's lerp: from the nearer end, so that weights 0 and 1 are exact.
  const V old_m = hn::LoadU(d, io.exp_avg + i);
  const bool near_old = s.first_weight < 0.5f;
  const V base = near_old ? old_m : g;
  const V weight = hn::Set(d, near_old ? s.first_weight : s.first_weight - 1.0f);
  const V m = hn::MulAdd(weight, hn::Sub(g, old_m), base);
  const V decayed = hn::Mul(hn::LoadU(d, io.exp_avg_sq + i), hn::Set(d, s.second_keep));
  const V v = hn::MulAdd(hn::Mul(g, hn::Set(d, s.second_weight)), g, decayed);

  const V denominator = hn::Add(hn::Div(hn::Sqrt(v), hn::Set(d, s.root_scale)), hn::Set(d, s.eps));
  p = hn::Sub(p, hn::Div(hn::Mul(hn::Set(d, s.step_size), m), denominator));
  hn::StoreU(m, d, io.exp_avg + i);
  hn::StoreU(v, d, io.exp_avg_sq + i);
  hn::StoreU(p, d, io.master + i);
  store_param<kOutput>(p, io.param, i);
}

template <Output kOutput, bool kMomentum>
HWY_INLINE void sgd_vector(const SgdStreams& io, size_t i, const SgdScalars& s) {
  const D d;
  V p = hn::LoadU(d, io.master + i);
  V update = hn::Mul(hn::LoadU(d, io.gradient + i), hn::Set(d, s.gradient_scale));
  if (s.l2_decay != 0.0f) update = hn::MulAdd(hn::Set(d, s.l2_decay), p, update);
  if constexpr (kMomentum) {
    V buffer = update;
    if (!s.first_step) {
      buffer = hn::MulAdd(hn::Set(d, s.gradient_keep), update,
                          hn::Mul(hn::LoadU(d, io.momentum + i), hn::Set(d, s.momentum)));
    }
    hn::StoreU(buffer, d, io.momentum + i);
    update = s.nesterov ? hn::MulAdd(hn::Set(d, s.momentum), buffer, update) : buffer;
  }
  p = hn::NegMulAdd(hn::Set(d, s.lr), update, p);
  hn::StoreU(p, d, io.master + i);
  store_param<kOutput>(p, io.param, i);
}

/// The last elements go through a padded copy and the same vector code, never through a scalar twin of it.
template <Output kOutput, bool kL2, Source kSource>
void adam_range(AdamStreams io, size_t count, const AdamScalars& s) {
  const size_t lanes = hn::Lanes(D());
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) adam_vector<kOutput, kL2, kSource>(io, i, s);
  const size_t rest = count - i;
  if (rest == 0) return;
  HWY_ALIGN float master[HWY_LANES(float)] = {}, exp_avg[HWY_LANES(float)] = {}, exp_avg_sq[HWY_LANES(float)] = {};
  HWY_ALIGN float gradient[GradientStreams::kMaxRows][HWY_LANES(float)] = {};
  HWY_ALIGN uint16_t param[HWY_LANES(float)] = {};
  const size_t bytes = rest * sizeof(float);
  std::memcpy(master, io.master + i, bytes);
  std::memcpy(exp_avg, io.exp_avg + i, bytes);
  std::memcpy(exp_avg_sq, io.exp_avg_sq + i, bytes);
  GradientStreams padded{{gradient[0], gradient[1]}, io.gradient.scale, kSource};
  for (int row = 0; row < kRowsOf<kSource>; ++row) {
    using T = RowType<kSource>;
    std::memcpy(gradient[row], static_cast<const T*>(io.gradient.rows[row]) + i, rest * sizeof(T));
  }
  adam_vector<kOutput, kL2, kSource>({master, exp_avg, exp_avg_sq, padded, {param, false}}, 0, s);
  std::memcpy(io.master + i, master, bytes);
  std::memcpy(io.exp_avg + i, exp_avg, bytes);
  std::memcpy(io.exp_avg_sq + i, exp_avg_sq, bytes);
  if constexpr (kOutput != Output::none) std::memcpy(io.param.data + i, param, rest * sizeof(uint16_t));
}

template <Output kOutput, bool kMomentum>
void sgd_range(SgdStreams io, size_t count, const SgdScalars& s) {
  const size_t lanes = hn::Lanes(D());
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) sgd_vector<kOutput, kMomentum>(io, i, s);
  const size_t rest = count - i;
  if (rest == 0) return;
  HWY_ALIGN float master[HWY_LANES(float)] = {}, momentum[HWY_LANES(float)] = {}, gradient[HWY_LANES(float)] = {};
  HWY_ALIGN uint16_t param[HWY_LANES(float)] = {};
  const size_t bytes = rest * sizeof(float);
  std::memcpy(master, io.master + i, bytes);
  if constexpr (kMomentum) std::memcpy(momentum, io.momentum + i, bytes);
  std::memcpy(gradient, io.gradient + i, bytes);
  sgd_vector<kOutput, kMomentum>({master, momentum, gradient, {param, false}}, 0, s);
  std::memcpy(io.master + i, master, bytes);
  if constexpr (kMomentum) std::memcpy(io.momentum + i, momentum, bytes);
  if constexpr (kOutput != Output::none) std::memcpy(io.param.data + i, param, rest * sizeof(uint16_t));
}

/// What went past the cache is seen by other threads before what they are told next.
template <class Streams>
void make_visible(const Streams& io) {
  if (io.param.past_cache) hwy::FlushStream();
}

template <Output kOutput, Source kSource = Source::summed>
void adam_output(const AdamStreams& io, size_t count, const AdamScalars& s) {
  s.l2_decay != 0.0f ? adam_range<kOutput, true, kSource>(io, count, s)
                     : adam_range<kOutput, false, kSource>(io, count, s);
  make_visible(io);
}

template <Output kOutput>
void sgd_output(const SgdStreams& io, size_t count, const SgdScalars& s) {
  io.momentum ? sgd_range<kOutput, true>(io, count, s) : sgd_range<kOutput, false>(io, count, s);
  make_visible(io);
}

void adam_vectors(const AdamStreams& io, size_t count, const AdamScalars& s, Output output) {
  if (io.gradient.source == Source::one_bf16) return adam_output<Output::bf16, Source::one_bf16>(io, count, s);
  if (io.gradient.source == Source::two_bf16) return adam_output<Output::bf16, Source::two_bf16>(io, count, s);
  if (output == Output::none) return adam_output<Output::none>(io, count, s);
  output == Output::bf16 ? adam_output<Output::bf16>(io, count, s) : adam_output<Output::fp16>(io, count, s);
}

void sgd_vectors(const SgdStreams& io, size_t count, const SgdScalars& s, Output output) {
  if (output == Output::none) return sgd_output<Output::none>(io, count, s);
  output == Output::bf16 ? sgd_output<Output::bf16>(io, count, s) : sgd_output<Output::fp16>(io, count, s);
}

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace deeptide::optim::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::optim::detail {
namespace {

HWY_EXPORT(adam_vectors);
HWY_EXPORT(sgd_vectors);
HWY_EXPORT(target_name);

constexpr int64_t kBlock = numerics::SumReader::kBlock;  // a multiple of every vector's width
constexpr int64_t kGrainBlocks = 8;                       // 32768 elements move about 1 MB: worth a thread

Output output_of(const at::Tensor& param) {
  if (!param.defined()) return Output::none;
  return param.scalar_type() == at::kBFloat16 ? Output::bf16 : Output::fp16;
}

/// From element `begin` on, a multiple of kBlock.
ParamStream param_stream(const at::Tensor& param, int64_t begin) {
  constexpr int64_t kLarge = 1 << 20;
  constexpr size_t kVector = 64;
  if (!param.defined()) return {nullptr, false};
  auto* data = static_cast<uint16_t*>(param.mutable_data_ptr()) + begin;
  const bool aligned = reinterpret_cast<uintptr_t>(data) % kVector == 0;
  return {data, aligned && static_cast<int64_t>(param.nbytes()) >= kLarge};
}

/// Calls `step(begin, count, gradient)` over all elements, on torch's threads. Rows that are not summed yet pass
/// through a block in the cache.
template <class Step>
void for_each_range(const numerics::Contributions& contributions, const Step& step) {
  const numerics::SumReader reader(contributions);
  parallel_blocks(contributions.rows[0].numel(), kBlock, kGrainBlocks, [&](int64_t begin, int64_t end) {
    HWY_ALIGN float scratch[kBlock];
    const int64_t length = contributions.is_summed() ? end - begin : kBlock;
    for (int64_t at = begin; at < end; at += length) {
      const int64_t count = std::min(length, end - at);
      step(at, static_cast<size_t>(count), reader.read(at, count, scratch));
    }
  });
}

/// What Adam's vector code reads by itself: a pass through the cache costs a tenth more.
Source source_of(const numerics::Contributions& gradient, Output output) {
  const size_t rows = gradient.rows.size();
  const bool direct = output == Output::bf16 && gradient.rows[0].scalar_type() == at::kBFloat16 && rows <= 2;
  if (!direct) return Source::summed;
  return rows == 1 ? Source::one_bf16 : Source::two_bf16;
}

/// From element `begin` on.
GradientStreams bf16_streams(const numerics::Contributions& gradient, Source source, int64_t begin) {
  GradientStreams streams{{}, static_cast<float>(gradient.scale), source};
  for (size_t row = 0; row < gradient.rows.size(); ++row) {
    streams.rows[row] = static_cast<const uint16_t*>(gradient.rows[row].const_data_ptr()) + begin;
  }
  return streams;
}

AdamStreams adam_streams(const AdamSegment& s, int64_t begin, const GradientStreams& gradient) {
  return {s.master.mutable_data_ptr<float>() + begin, s.exp_avg.mutable_data_ptr<float>() + begin,
          s.exp_avg_sq.mutable_data_ptr<float>() + begin, gradient, param_stream(s.param, begin)};
}

}  // namespace

const char* chosen_target() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

void adam_step_cpu(const AdamSegment& segment, const AdamScalars& scalars) {
  const Output output = output_of(segment.param);
  const Source source = source_of(segment.gradient, output);
  if (source == Source::summed) {
    for_each_range(segment.gradient, [&](int64_t begin, size_t count, const float* gradient) {
      const auto streams = adam_streams(segment, begin, {{gradient}, 1.0f, source});
      HWY_DYNAMIC_DISPATCH(adam_vectors)(streams, count, scalars, output);
    });
    return;
  }
  parallel_blocks(segment.master.numel(), kBlock, kGrainBlocks, [&](int64_t begin, int64_t end) {
    const auto streams = adam_streams(segment, begin, bf16_streams(segment.gradient, source, begin));
    HWY_DYNAMIC_DISPATCH(adam_vectors)(streams, static_cast<size_t>(end - begin), scalars, output);
  });
}

void sgd_step_cpu(const SgdSegment& segment, const SgdScalars& scalars) {
  float* master = segment.master.mutable_data_ptr<float>();
  float* momentum = segment.momentum.defined() ? segment.momentum.mutable_data_ptr<float>() : nullptr;
  const Output output = output_of(segment.param);
  for_each_range(segment.gradient, [&](int64_t begin, size_t count, const float* gradient) {
    const SgdStreams streams{master + begin, momentum ? momentum + begin : nullptr, gradient,
                             param_stream(segment.param, begin)};
    HWY_DYNAMIC_DISPATCH(sgd_vectors)(streams, count, scalars, output);
  });
}

}  // namespace deeptide::optim::detail
#endif
