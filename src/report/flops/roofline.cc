// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Measures a matrix product and a triad, and compares operators with them.
#include "report/flops/roofline.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <functional>

#include "device/lane.h"
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

/// Operations per second of a product of square matrices.
double product_rate(const at::TensorOptions& options, int64_t side) {
  const at::Tensor a = at::ones({side, side}, options), b = at::ones({side, side}, options);
  at::Tensor c = at::empty({side, side}, options);
  const auto elements = static_cast<double>(side);
  return 2.0 * elements * elements * elements / best_seconds(options.device(), [&] { at::mm_out(c, a, b); });
}

}  // namespace

MachinePeak measure_peak(c10::Device device, c10::ScalarType dtype) {
  const c10::AutoGradMode no_grad(false);
  const int64_t numel = device.is_cpu() ? int64_t{1} << 23 : int64_t{1} << 27;
  const auto options = at::TensorOptions().device(device).dtype(dtype);
  MachinePeak peak;
  peak.flops_per_s =
      device.is_cpu()
          ? report::rate_of_largest(128, 1024, kLongest_s, [&](int64_t side) { return product_rate(options, side); })
          : product_rate(options, 8192);
  const auto floats = options.dtype(at::kFloat);
  const at::Tensor a = at::ones({numel}, floats), b = at::ones({numel}, floats);
  at::Tensor c = at::ones({numel}, floats);
  peak.bytes_per_s = 12.0 * static_cast<double>(numel) / best_seconds(device, [&] { at::add_out(c, a, b, 3.0); });
  return peak;
}

namespace report {

double rate_of_largest(int64_t least, int64_t most, double longest_s, const std::function<double(int64_t)>& rate_at) {
  for (int64_t side = least;; side *= 2) {
    const double rate = rate_at(side);
    const auto next = static_cast<double>(2 * side);
    if (2 * side > most || 2.0 * next * next * next / rate > longest_s) return rate;
  }
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
