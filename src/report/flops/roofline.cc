// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Measures a matrix product and a triad, and compares operators with them.
#include "report/flops/roofline.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "device/lane.h"
#include "device/memory/cached_memory.h"
#include "trace/recorder.h"

namespace deeptide {
namespace {

constexpr int kRounds = 4;
constexpr double kLongest_s = 0.1;  // a step's report waits for this: a product of a type that the CPU lacks is small

double seconds_of(c10::Device device, const std::function<void()>& work) {
  const int64_t begin = trace::now_ns();
  work();
  if (!device.is_cpu()) device::Lane::current(device).mark().wait();
  return static_cast<double>(trace::now_ns() - begin) * 1e-9;
}

/// The best of at most kRounds, and of fewer where they last.
double best_seconds(c10::Device device, const std::function<void()>& work) {
  double best = seconds_of(device, work), all = best;
  for (int round = 1; round < kRounds && all < kLongest_s; ++round) {
    const double seconds = seconds_of(device, work);
    best = std::min(best, seconds);
    all += seconds;
  }
  return best;
}

/// Operations of a product of square matrices.
double product_work(int64_t side) { return 2.0 * std::pow(static_cast<double>(side), 3); }

/// The best of the three layouts that a layer multiplies in: its output, its input's gradient and its weight's. A type
/// that the CPU lacks has a fast routine for some of them only.
double product_rate(const at::TensorOptions& options, int64_t side) {
  const at::Tensor a = at::ones({side, side}, options), b = at::ones({side, side}, options);
  at::Tensor c = at::empty({side, side}, options);
  double best = 0.0;
  for (const auto& [left, right] : {std::pair(a, b.t()), std::pair(a, b), std::pair(a.t(), b)}) {
    best = std::max(best, product_work(side) / best_seconds(options.device(), [&] { at::mm_out(c, left, right); }));
  }
  return best;
}

/// Bytes that a sum of two fp32 vectors reads and writes.
double triad_work(int64_t numel) { return 12.0 * static_cast<double>(numel); }

double triad_rate(c10::Device device, int64_t numel) {
  const auto floats = at::TensorOptions().device(device).dtype(at::kFloat);
  const at::Tensor a = at::ones({numel}, floats), b = at::ones({numel}, floats);
  at::Tensor c = at::ones({numel}, floats);
  return triad_work(numel) / best_seconds(device, [&] { at::add_out(c, a, b, 3.0); });
}

}  // namespace

MachinePeak measure_peak(c10::Device device, c10::ScalarType dtype) {
  const c10::AutoGradMode no_grad(false);
  const auto options = at::TensorOptions().device(device).dtype(dtype);
  if (!device.is_cpu()) product_rate(options, 128);  // the first product of all takes libraries' start
  MachinePeak peak;
  // The largest is not always the fastest: a slow routine takes over where a product leaves the CPU's caches.
  report::rate_of_largest(128, device.is_cpu() ? 1024 : 8192, kLongest_s, product_work, [&](int64_t side) {
    const double rate = product_rate(options, side);
    peak.flops_per_s = std::max(peak.flops_per_s, rate);
    return rate;
  });
  constexpr int64_t kLeast = int64_t{1} << 23;  // beyond CPUs' caches
  peak.bytes_per_s = report::rate_of_largest(kLeast, device.is_cpu() ? kLeast : kLeast << 4, kLongest_s, triad_work,
                                             [&](int64_t numel) { return triad_rate(device, numel); });
  device::release_cached_memory(device);
  return peak;
}

namespace report {

double rate_of_largest(int64_t least, int64_t most, double longest_s, const std::function<double(int64_t)>& work_of,
                       const std::function<double(int64_t)>& rate_at) {
  double rate = rate_at(least);
  for (int64_t size = 2 * least; size <= most && work_of(size) / rate <= longest_s; size *= 2) {
    try {
      rate = rate_at(size);
    } catch (const c10::OutOfMemoryError&) {
      break;  // beside a model that fills the device
    }
  }
  return rate;
}

Roofline judge(const std::vector<OperatorUse>& uses, const MachinePeak& peak, bool timed) {
  Roofline roofline;
  double by_memory = 0.0, bytes = 0.0;
  for (const OperatorUse& use : uses) {
    const double products = 2.0 * static_cast<double>(use.macs) / peak.flops_per_s;
    const double moves = static_cast<double>(use.bytes) / peak.bytes_per_s;
    const double seconds = timed ? use.seconds : std::max(products, moves);
    roofline.macs += use.macs;
    roofline.seconds += seconds;
    if (moves <= products || use.bytes == 0) continue;
    by_memory += seconds;
    bytes += static_cast<double>(use.bytes);
  }
  if (roofline.seconds > 0.0) roofline.memory_bound = by_memory / roofline.seconds;
  if (by_memory > 0.0) roofline.bytes_per_s = bytes / by_memory;
  return roofline;
}

}  // namespace report
}  // namespace deeptide
