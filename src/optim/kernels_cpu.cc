// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The optimizer steps as one pass of vector code, compiled once per instruction set and chosen at run time.
#include <ATen/core/Tensor.h>
#include <c10/util/Half.h>

#include <cstring>

#include "device/parallel.h"
#include "optim/kernels_detail.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels_cpu.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include <hwy/highway.h>

#ifndef DEEPTIDE_OPTIM_KERNELS_CPU_ONCE
#define DEEPTIDE_OPTIM_KERNELS_CPU_ONCE
namespace deeptide::optim::detail {

enum class Output : uint8_t { none, bf16, fp16 };

/// A step's streams from some element on. `param` (and SGD's `momentum`) are null when the step has none.
struct AdamStreams {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  const float* gradient;
  uint16_t* param;
};

struct SgdStreams {
  float* master;
  float* momentum;
  const float* gradient;
  uint16_t* param;
};

}  // namespace deeptide::optim::detail
#endif

HWY_BEFORE_NAMESPACE();
namespace deeptide::optim::detail::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

/// Rounds to nearest even, as torch does; a NaN becomes the quiet NaN, since rounding could carry its bits into Inf.
HWY_INLINE void store_bf16(V x, uint16_t* to) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFu))));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(x));
  const auto halves = hn::IfThenElse(is_nan, hn::Set(du, 0x7FC0u), rounded);
  hn::StoreU(hn::DemoteTo(hn::Rebind<uint16_t, D>(), hn::BitCast(di, halves)), hn::Rebind<uint16_t, D>(), to);
}

HWY_INLINE void store_fp16(V x, uint16_t* to) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  // Highway's emulation does not round as the hardware does.
  HWY_ALIGN float lanes[HWY_LANES(float)];
  hn::Store(x, D(), lanes);
  for (size_t i = 0; i < hn::Lanes(D()); ++i) to[i] = c10::Half(lanes[i]).x;
#else
  const hn::Rebind<hwy::float16_t, D> d16;
  hn::StoreU(hn::DemoteTo(d16, x), d16, reinterpret_cast<hwy::float16_t*>(to));
#endif
}

template <Output kOutput>
HWY_INLINE void store_param(V x, uint16_t* to, size_t i) {
  if constexpr (kOutput == Output::bf16) store_bf16(x, to + i);
  if constexpr (kOutput == Output::fp16) store_fp16(x, to + i);
}

template <Output kOutput, bool kL2>
HWY_INLINE void adam_vector(const AdamStreams& io, size_t i, const AdamScalars& s) {
  const D d;
  V p = hn::LoadU(d, io.master + i);
  V g = hn::Mul(hn::LoadU(d, io.gradient + i), hn::Set(d, s.gradient_scale));
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
template <Output kOutput, bool kL2>
void adam_range(AdamStreams io, size_t count, const AdamScalars& s) {
  const size_t lanes = hn::Lanes(D());
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) adam_vector<kOutput, kL2>(io, i, s);
  const size_t rest = count - i;
  if (rest == 0) return;
  HWY_ALIGN float master[HWY_LANES(float)] = {}, exp_avg[HWY_LANES(float)] = {}, exp_avg_sq[HWY_LANES(float)] = {},
                  gradient[HWY_LANES(float)] = {};
  HWY_ALIGN uint16_t param[HWY_LANES(float)] = {};
  const size_t bytes = rest * sizeof(float);
  std::memcpy(master, io.master + i, bytes);
  std::memcpy(exp_avg, io.exp_avg + i, bytes);
  std::memcpy(exp_avg_sq, io.exp_avg_sq + i, bytes);
  std::memcpy(gradient, io.gradient + i, bytes);
  adam_vector<kOutput, kL2>({master, exp_avg, exp_avg_sq, gradient, param}, 0, s);
  std::memcpy(io.master + i, master, bytes);
  std::memcpy(io.exp_avg + i, exp_avg, bytes);
  std::memcpy(io.exp_avg_sq + i, exp_avg_sq, bytes);
  if constexpr (kOutput != Output::none) std::memcpy(io.param + i, param, rest * sizeof(uint16_t));
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
  sgd_vector<kOutput, kMomentum>({master, momentum, gradient, param}, 0, s);
  std::memcpy(io.master + i, master, bytes);
  if constexpr (kMomentum) std::memcpy(io.momentum + i, momentum, bytes);
  if constexpr (kOutput != Output::none) std::memcpy(io.param + i, param, rest * sizeof(uint16_t));
}

template <Output kOutput>
void adam_output(const AdamStreams& io, size_t count, const AdamScalars& s) {
  s.l2_decay != 0.0f ? adam_range<kOutput, true>(io, count, s) : adam_range<kOutput, false>(io, count, s);
}

template <Output kOutput>
void sgd_output(const SgdStreams& io, size_t count, const SgdScalars& s) {
  io.momentum ? sgd_range<kOutput, true>(io, count, s) : sgd_range<kOutput, false>(io, count, s);
}

void adam_vectors(const AdamStreams& io, size_t count, const AdamScalars& s, Output output) {
  if (output == Output::none) return adam_output<Output::none>(io, count, s);
  output == Output::bf16 ? adam_output<Output::bf16>(io, count, s) : adam_output<Output::fp16>(io, count, s);
}

void sgd_vectors(const SgdStreams& io, size_t count, const SgdScalars& s, Output output) {
  if (output == Output::none) return sgd_output<Output::none>(io, count, s);
  output == Output::bf16 ? sgd_output<Output::bf16>(io, count, s) : sgd_output<Output::fp16>(io, count, s);
}

}  // namespace deeptide::optim::detail::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::optim::detail {
namespace {

HWY_EXPORT(adam_vectors);
HWY_EXPORT(sgd_vectors);

constexpr int64_t kBlock = 4096;     // elements; a multiple of every vector's width
constexpr int64_t kGrainBlocks = 8;  // 32768 elements move about 1 MB: worth a thread

Output output_of(const at::Tensor& param) {
  if (!param.defined()) return Output::none;
  return param.scalar_type() == at::kBFloat16 ? Output::bf16 : Output::fp16;
}

uint16_t* param_pointer(const at::Tensor& param) {
  return param.defined() ? static_cast<uint16_t*>(param.mutable_data_ptr()) : nullptr;
}

template <class T>
T* offset(T* pointer, int64_t elements) {
  return pointer ? pointer + elements : nullptr;
}

}  // namespace

void adam_step_cpu(const AdamSegment& segment, const AdamScalars& scalars) {
  const AdamStreams all{segment.master.mutable_data_ptr<float>(), segment.exp_avg.mutable_data_ptr<float>(),
                        segment.exp_avg_sq.mutable_data_ptr<float>(), segment.gradient.const_data_ptr<float>(),
                        param_pointer(segment.param)};
  const Output output = output_of(segment.param);
  parallel_blocks(segment.master.numel(), kBlock, kGrainBlocks, [&](int64_t begin, int64_t end) {
    const AdamStreams part{all.master + begin, all.exp_avg + begin, all.exp_avg_sq + begin, all.gradient + begin,
                           offset(all.param, begin)};
    HWY_DYNAMIC_DISPATCH(adam_vectors)(part, static_cast<size_t>(end - begin), scalars, output);
  });
}

void sgd_step_cpu(const SgdSegment& segment, const SgdScalars& scalars) {
  const SgdStreams all{segment.master.mutable_data_ptr<float>(),
                       segment.momentum.defined() ? segment.momentum.mutable_data_ptr<float>() : nullptr,
                       segment.gradient.const_data_ptr<float>(), param_pointer(segment.param)};
  const Output output = output_of(segment.param);
  parallel_blocks(segment.master.numel(), kBlock, kGrainBlocks, [&](int64_t begin, int64_t end) {
    const SgdStreams part{all.master + begin, offset(all.momentum, begin), all.gradient + begin,
                          offset(all.param, begin)};
    HWY_DYNAMIC_DISPATCH(sgd_vectors)(part, static_cast<size_t>(end - begin), scalars, output);
  });
}

}  // namespace deeptide::optim::detail
#endif
