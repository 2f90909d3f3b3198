// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// GELU by tanh as vector code: x / (1 + exp(-z)), where tanh(z / 2) is torch's tanh.
#include <ATen/core/Tensor.h>

#include "device/parallel.h"
#include "ops/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gelu_cpu.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// Must follow foreach_target.h, as Highway requires.
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include "numerics/rounding/float_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deeptide::ops::HWY_NAMESPACE {
using namespace numerics::HWY_NAMESPACE;

constexpr float kScale = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kCubic = 0.044715f;
constexpr float kLargest = 104.0f;  // its exp() is infinite; exp() allows no larger argument

/// 1 / (1 + exp(-z)) at z = kScale (x + kCubic x^3).
HWY_INLINE V sigmoid(V x, V x_squared) {
  const D d;
  const V z = hn::Mul(hn::Mul(x, hn::Set(d, kScale)), hn::MulAdd(x_squared, hn::Set(d, kCubic), hn::Set(d, 1.0f)));
  const V one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, hn::Exp(d, hn::Min(hn::Neg(z), hn::Set(d, kLargest)))));
}

HWY_INLINE V gelu(V x) { return hn::Mul(x, sigmoid(x, hn::Mul(x, x))); }

HWY_INLINE V gelu_gradient(V gradient, V x) {
  const D d;
  const V x_squared = hn::Mul(x, x);
  const V s = sigmoid(x, x_squared);
  const V slope = hn::Mul(hn::Set(d, kScale), hn::MulAdd(x_squared, hn::Set(d, 3 * kCubic), hn::Set(d, 1.0f)));
  const V bend = hn::Mul(hn::Mul(x, slope), hn::NegMulAdd(s, s, s));  // x z' s (1 - s)
  return hn::Mul(gradient, hn::Add(s, bend));
}

template <typename T>
void gelu_range(const T* x, T* y, size_t count) {
  each_vector(0, count, [&](auto part, size_t i) { part.put(gelu(part.get(x + i)), y + i); });
}

template <typename T>
void gelu_gradient_range(const T* gradient, const T* x, T* to, size_t count) {
  each_vector(0, count,
              [&](auto part, size_t i) { part.put(gelu_gradient(part.get(gradient + i), part.get(x + i)), to + i); });
}

void gelu_fp32(const float* x, float* y, size_t count) { gelu_range(x, y, count); }
void gelu_bf16(const c10::BFloat16* x, c10::BFloat16* y, size_t count) { gelu_range(x, y, count); }
void gelu_gradient_fp32(const float* g, const float* x, float* to, size_t n) { gelu_gradient_range(g, x, to, n); }
void gelu_gradient_bf16(const c10::BFloat16* g, const c10::BFloat16* x, c10::BFloat16* to, size_t n) {
  gelu_gradient_range(g, x, to, n);
}

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace deeptide::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::ops {
namespace {

using at::Tensor;

HWY_EXPORT(gelu_fp32);
HWY_EXPORT(gelu_bf16);
HWY_EXPORT(gelu_gradient_fp32);
HWY_EXPORT(gelu_gradient_bf16);
HWY_EXPORT(target_name);

constexpr int64_t kBlock = 16;    // elements, the widest vector's: where a range is cut changes no result
constexpr int64_t kGrain = 1024;  // blocks

}  // namespace

const char* kernel_target() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

void gelu_tanh_cpu(const Tensor& x, const Tensor& y) {
  const void* from = x.const_data_ptr();
  void* to = y.mutable_data_ptr();
  const bool fp32 = x.scalar_type() == at::kFloat;
  parallel_blocks(x.numel(), kBlock, kGrain, [=](int64_t begin, int64_t end) {
    const size_t count = end - begin;
    if (fp32) {
      HWY_DYNAMIC_DISPATCH(gelu_fp32)(static_cast<const float*>(from) + begin, static_cast<float*>(to) + begin, count);
    } else {
      HWY_DYNAMIC_DISPATCH(gelu_bf16)
      (static_cast<const c10::BFloat16*>(from) + begin, static_cast<c10::BFloat16*>(to) + begin, count);
    }
  });
}

void gelu_tanh_backward_cpu(const Tensor& gradient, const Tensor& x, const Tensor& x_gradient) {
  const void *above = gradient.const_data_ptr(), *from = x.const_data_ptr();
  void* to = x_gradient.mutable_data_ptr();
  const bool fp32 = x.scalar_type() == at::kFloat;
  parallel_blocks(x.numel(), kBlock, kGrain, [=](int64_t begin, int64_t end) {
    const size_t count = end - begin;
    if (fp32) {
      HWY_DYNAMIC_DISPATCH(gelu_gradient_fp32)
      (static_cast<const float*>(above) + begin, static_cast<const float*>(from) + begin,
       static_cast<float*>(to) + begin, count);
    } else {
      HWY_DYNAMIC_DISPATCH(gelu_gradient_bf16)
      (static_cast<const c10::BFloat16*>(above) + begin, static_cast<const c10::BFloat16*>(from) + begin,
       static_cast<c10::BFloat16*>(to) + begin, count);
    }
  });
}

}  // namespace deeptide::ops
#endif  // HWY_ONCE
