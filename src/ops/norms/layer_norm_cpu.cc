// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Layer normalization of a sum as vector code: each row is summed, measured and normalized while it is in the cache.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>

#include "device/parallel.h"
#include "ops/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/norms/layer_norm_cpu.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "numerics/rounding/float_vectors-inl.h"

#ifndef DEEPTIDE_OPS_LAYER_NORM_CPU_ONCE
#define DEEPTIDE_OPS_LAYER_NORM_CPU_ONCE
namespace deeptide::ops {

/// All rows of a forward; T is float, or c10::BFloat16 for bf16. Without a residual `summed` is not written.
template <typename T>
struct NormRows {
  const T *x, *residual;
  const float *weight, *bias;
  T *summed, *normed;
  float *mean, *rstd;
  size_t width;
  double eps;
};

/// All rows of a backward; `summed_gradient` may be null.
template <typename T>
struct NormGradientRows {
  const T *gradient, *summed_gradient, *summed;
  const float *mean, *rstd, *weight;
  T* x_gradient;
  size_t width;
};

}  // namespace deeptide::ops
#endif

HWY_BEFORE_NAMESPACE();
namespace deeptide::ops::HWY_NAMESPACE {
using namespace numerics::HWY_NAMESPACE;

constexpr size_t kSumBlock = 1024;  // elements in one fp32 sum: a longer row's would lose bits, blocks add in fp64

/// Four sums at once, since each waits for its own last addition.
template <typename Value>
HWY_INLINE double sum_row(size_t width, Value value) {
  const D d;
  const size_t lanes = hn::Lanes(d);
  double total = 0.0;
  for (size_t begin = 0; begin < width; begin += kSumBlock) {
    const size_t end = HWY_MIN(begin + kSumBlock, width);
    V a = hn::Zero(d), b = a, c = a, e = a;
    size_t i = begin;
    for (; i + 4 * lanes <= end; i += 4 * lanes) {
      a = hn::Add(a, value(Whole(), i));
      b = hn::Add(b, value(Whole(), i + lanes));
      c = hn::Add(c, value(Whole(), i + 2 * lanes));
      e = hn::Add(e, value(Whole(), i + 3 * lanes));
    }
    each_vector(i, end, [&](auto part, size_t j) { a = hn::Add(a, part.keep(value(part, j))); });
    total += hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(a, b), hn::Add(c, e))));
  }
  return total;
}

/// The mean first, then the squares around it: two passes over the cached row lose less than sums of squares.
template <typename T>
void normalize_row(const NormRows<T>& rows, size_t n) {
  const D d;
  const size_t width = rows.width, at = n * width;
  const T *x = rows.x + at, *summed = rows.residual == nullptr ? x : rows.summed + at;
  double total;
  if (rows.residual == nullptr) {
    total = sum_row(width, [&](auto part, size_t i) { return part.get(x + i); });
  } else {
    const T* residual = rows.residual + at;
    T* to = rows.summed + at;
    total = sum_row(width, [&](auto part, size_t i) {
      part.put(hn::Add(part.get(x + i), part.get(residual + i)), to + i);
      return part.get(to + i);  // as rounded
    });
  }
  const float mean = static_cast<float>(total / static_cast<double>(width));
  const V center = hn::Set(d, mean);
  const double squares = sum_row(width, [&](auto part, size_t i) {
    const V apart = hn::Sub(part.get(summed + i), center);
    return hn::Mul(apart, apart);
  });
  const float rstd = static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(width) + rows.eps));
  const V scale = hn::Set(d, rstd);
  const float *weight = rows.weight, *bias = rows.bias;
  T* normed = rows.normed + at;
  each_vector(0, width, [&](auto part, size_t i) {
    const V normal = hn::Mul(hn::Sub(part.get(summed + i), center), scale);
    part.put(hn::MulAdd(normal, part.get(weight + i), part.get(bias + i)), normed + i);
  });
  rows.mean[n] = mean;
  rows.rstd[n] = rstd;
}

/// The means of g and of g xhat in a row, where g is dy weight and xhat the normalized x.
struct GradientMeans {
  double g, g_xhat;
};

/// Reads a row of gradients, or two for one pass over the sums: adds to weight's and bias's what the rows give them.
/// Rows are written out, not looped over: their sums stay in registers.
template <size_t kRows, typename T>
HWY_INLINE void measure_gradients(const NormGradientRows<T>& rows, size_t n, float* weight_sum, float* bias_sum,
                                  GradientMeans* means) {
  const D d;
  const size_t width = rows.width, next = n + kRows - 1;
  const float* weight = rows.weight;
  const T *dy = rows.gradient + n * width, *x = rows.summed + n * width;
  const T *next_dy = rows.gradient + next * width, *next_x = rows.summed + next * width;
  const T *dx = rows.x_gradient + n * width, *next_dx = rows.x_gradient + next * width;
  const V mean = hn::Set(d, rows.mean[n]), rstd = hn::Set(d, rows.rstd[n]);
  const V next_mean = hn::Set(d, rows.mean[next]), next_rstd = hn::Set(d, rows.rstd[next]);
  for (size_t begin = 0; begin < width; begin += kSumBlock) {
    V sum_g = hn::Zero(d), sum_g_xhat = sum_g, next_sum_g = sum_g, next_sum_g_xhat = sum_g;
    each_vector(begin, HWY_MIN(begin + kSumBlock, width), [&](auto part, size_t i) {
      const V w = part.get(weight + i);
      // Fetches what write_gradient() is about to write: large tensors lie in memory, and its stores would wait.
      __builtin_prefetch(dx + i, 1);
      __builtin_prefetch(next_dx + i, 1);
      V weight_gradient = part.get(weight_sum + i), bias_gradient = part.get(bias_sum + i);
      const auto add_row = [&](V row_dy, V xhat, V& sum, V& sum_xhat) {
        const V g = hn::Mul(row_dy, w);
        sum = hn::Add(sum, g);
        sum_xhat = hn::MulAdd(g, xhat, sum_xhat);
        weight_gradient = hn::MulAdd(row_dy, xhat, weight_gradient);
        bias_gradient = hn::Add(bias_gradient, row_dy);
      };
      add_row(part.get(dy + i), hn::Mul(hn::Sub(part.get(x + i), mean), rstd), sum_g, sum_g_xhat);
      if constexpr (kRows == 2) {
        const V xhat = hn::Mul(hn::Sub(part.get(next_x + i), next_mean), next_rstd);
        add_row(part.get(next_dy + i), xhat, next_sum_g, next_sum_g_xhat);
      }
      part.put(weight_gradient, weight_sum + i);
      part.put(bias_gradient, bias_sum + i);
    });
    means[0].g += hn::GetLane(hn::SumOfLanes(d, sum_g)) / static_cast<double>(width);
    means[0].g_xhat += hn::GetLane(hn::SumOfLanes(d, sum_g_xhat)) / static_cast<double>(width);
    if constexpr (kRows == 2) {
      means[1].g += hn::GetLane(hn::SumOfLanes(d, next_sum_g)) / static_cast<double>(width);
      means[1].g_xhat += hn::GetLane(hn::SumOfLanes(d, next_sum_g_xhat)) / static_cast<double>(width);
    }
  }
}

/// dx = rstd (g - mean(g) - xhat mean(g xhat)), plus the sum's own gradient.
template <typename T>
void write_gradient(const NormGradientRows<T>& rows, size_t n, GradientMeans means) {
  const D d;
  const size_t width = rows.width;
  const float* weight = rows.weight;
  const T *dy = rows.gradient + n * width, *x = rows.summed + n * width;
  T* dx = rows.x_gradient + n * width;
  const V mean = hn::Set(d, rows.mean[n]), rstd = hn::Set(d, rows.rstd[n]);
  const V mean_g = hn::Set(d, static_cast<float>(means.g));
  const V mean_g_xhat = hn::Set(d, static_cast<float>(means.g_xhat));
  const auto gradient = [&](auto part, size_t i) {
    hwy::Prefetch(dy + 2 * width + i);  // of the next two rows, while this one is written
    hwy::Prefetch(x + 2 * width + i);
    const V g = hn::Mul(part.get(dy + i), part.get(weight + i));
    const V xhat = hn::Mul(hn::Sub(part.get(x + i), mean), rstd);
    return hn::Mul(rstd, hn::NegMulAdd(xhat, mean_g_xhat, hn::Sub(g, mean_g)));
  };
  if (rows.summed_gradient == nullptr) {
    each_vector(0, width, [&](auto part, size_t i) { part.put(gradient(part, i), dx + i); });
  } else {
    const T* more = rows.summed_gradient + n * width;
    each_vector(0, width,
                [&](auto part, size_t i) { part.put(hn::Add(gradient(part, i), part.get(more + i)), dx + i); });
  }
}

template <typename T>
void normalize_rows(const NormRows<T>& rows, size_t begin, size_t end) {
  for (size_t n = begin; n < end; ++n) normalize_row(rows, n);
}

template <typename T>
void gradient_rows(const NormGradientRows<T>& rows, size_t begin, size_t end, float* sums) {
  for (size_t i = 0; i < 2 * rows.width; ++i) sums[i] = 0.0f;
  float *weight_sum = sums, *bias_sum = sums + rows.width;
  for (size_t n = begin; n < end; n += 2) {
    GradientMeans means[2] = {};
    if (n + 1 < end) {
      measure_gradients<2>(rows, n, weight_sum, bias_sum, means);
      write_gradient(rows, n, means[0]);
      write_gradient(rows, n + 1, means[1]);
    } else {
      measure_gradients<1>(rows, n, weight_sum, bias_sum, means);
      write_gradient(rows, n, means[0]);
    }
  }
}

void rows_fp32(const NormRows<float>& rows, size_t begin, size_t end) { normalize_rows(rows, begin, end); }
void rows_bf16(const NormRows<c10::BFloat16>& rows, size_t begin, size_t end) { normalize_rows(rows, begin, end); }
void gradient_rows_fp32(const NormGradientRows<float>& rows, size_t begin, size_t end, float* sums) {
  gradient_rows(rows, begin, end, sums);
}
void gradient_rows_bf16(const NormGradientRows<c10::BFloat16>& rows, size_t begin, size_t end, float* sums) {
  gradient_rows(rows, begin, end, sums);
}

/// Adds `from` to `to`.
void add_to(const float* from, float* to, size_t width) {
  each_vector(0, width, [&](auto part, size_t i) { part.put(hn::Add(part.get(to + i), part.get(from + i)), to + i); });
}

}  // namespace deeptide::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::ops {
namespace {

using at::Tensor;

HWY_EXPORT(rows_fp32);
HWY_EXPORT(rows_bf16);
HWY_EXPORT(gradient_rows_fp32);
HWY_EXPORT(gradient_rows_bf16);
HWY_EXPORT(add_to);

constexpr int64_t kGrainElements = 16384;
constexpr int64_t kMinChunk = 16, kMaxChunks = 64;  // of rows, for the sums over them

template <typename T>
const T* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? static_cast<const T*>(tensor.const_data_ptr()) : nullptr;
}

template <typename T, typename Kernel>
void forward(const LayerNormInputs& from, const LayerNormResults& to, Kernel kernel) {
  const int64_t width = from.weight_D.numel();
  const NormRows<T> rows{data_or_null<T>(from.x),
                         data_or_null<T>(from.residual),
                         from.weight_D.const_data_ptr<float>(),
                         from.bias_D.const_data_ptr<float>(),
                         from.residual.defined() ? static_cast<T*>(to.summed.mutable_data_ptr()) : nullptr,
                         static_cast<T*>(to.normed.mutable_data_ptr()),
                         to.mean_N.mutable_data_ptr<float>(),
                         to.rstd_N.mutable_data_ptr<float>(),
                         static_cast<size_t>(width),
                         from.eps};
  const int64_t grain = std::max<int64_t>(1, kGrainElements / width);
  parallel_blocks(to.mean_N.numel(), 1, grain, [&](int64_t begin, int64_t end) { kernel(rows, begin, end); });
}

template <typename T, typename Kernel>
void backward(const LayerNormGradients& from, const LayerNormInputGradients& to, Kernel kernel) {
  const int64_t count = from.mean_N.numel(), width = from.weight_D.numel();
  const NormGradientRows<T> rows{data_or_null<T>(from.normed_gradient),
                                 data_or_null<T>(from.summed_gradient),
                                 data_or_null<T>(from.summed),
                                 from.mean_N.const_data_ptr<float>(),
                                 from.rstd_N.const_data_ptr<float>(),
                                 from.weight_D.const_data_ptr<float>(),
                                 static_cast<T*>(to.x.mutable_data_ptr()),
                                 static_cast<size_t>(width)};
  // The number of rows alone says how they are cut, so that the sums do not depend on the threads.
  const int64_t chunk = std::max(kMinChunk, (count + kMaxChunks - 1) / kMaxChunks);
  const int64_t num_chunks = (count + chunk - 1) / chunk;
  const Tensor sums_C2D = from.mean_N.new_empty({num_chunks, 2, width});
  float* const sums = sums_C2D.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, kGrainElements / (chunk * width));
  parallel_blocks(count, chunk, grain, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += chunk) {
      kernel(rows, first, std::min(first + chunk, end), sums + first / chunk * 2 * width);
    }
  });
  float *weight_sum = to.weight_D.mutable_data_ptr<float>(), *bias_sum = to.bias_D.mutable_data_ptr<float>();
  std::copy_n(sums, width, weight_sum);
  std::copy_n(sums + width, width, bias_sum);
  for (int64_t c = 1; c < num_chunks; ++c) {
    HWY_DYNAMIC_DISPATCH(add_to)(sums + 2 * c * width, weight_sum, width);
    HWY_DYNAMIC_DISPATCH(add_to)(sums + (2 * c + 1) * width, bias_sum, width);
  }
}

}  // namespace

void layer_norm_cpu(const LayerNormInputs& from, const LayerNormResults& to) {
  if (from.x.scalar_type() == at::kFloat) {
    forward<float>(from, to, HWY_DYNAMIC_DISPATCH(rows_fp32));
  } else {
    forward<c10::BFloat16>(from, to, HWY_DYNAMIC_DISPATCH(rows_bf16));
  }
}

void layer_norm_backward_cpu(const LayerNormGradients& from, const LayerNormInputGradients& to) {
  if (from.summed.scalar_type() == at::kFloat) {
    backward<float>(from, to, HWY_DYNAMIC_DISPATCH(gradient_rows_fp32));
  } else {
    backward<c10::BFloat16>(from, to, HWY_DYNAMIC_DISPATCH(gradient_rows_bf16));
  }
}

}  // namespace deeptide::ops
#endif  // HWY_ONCE
