// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The numeric kernels beside a triad and memcpy over as many bytes, and beside torch's fused AdamW; one thread.
//
// Read ratios within one run only: --benchmark_enable_random_interleaving=true --benchmark_repetitions=10
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "numerics/sums/ordered_sum.h"
#include "optim/rules/rule.h"

using at::Tensor;

namespace {

constexpr int64_t kNumel = 16 << 20;
constexpr size_t kLargePage = 2 << 20;

/// A flat tensor on large pages, where the kernel has them: page walks would hide what is measured.
Tensor on_large_pages(int64_t numel, at::ScalarType dtype, double value) {
  const size_t bytes = static_cast<size_t>(numel) * c10::elementSize(dtype) + 2 * kLargePage;
  void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(mapping != MAP_FAILED, "cannot map ", bytes, " bytes");
  madvise(mapping, bytes, MADV_HUGEPAGE);
  const auto start = (reinterpret_cast<uintptr_t>(mapping) + kLargePage - 1) / kLargePage * kLargePage;
  const auto unmap = [mapping, bytes](void*) { munmap(mapping, bytes); };
  return at::from_blob(reinterpret_cast<void*>(start), {numel}, unmap, at::TensorOptions(dtype)).fill_(value);
}

struct AdamBuffers {
  Tensor master = on_large_pages(kNumel, at::kFloat, 1.0);
  Tensor exp_avg = on_large_pages(kNumel, at::kFloat, 0.01);
  Tensor exp_avg_sq = on_large_pages(kNumel, at::kFloat, 0.01);
  Tensor gradient = on_large_pages(kNumel, at::kFloat, 0.1);
};

AdamBuffers& adam_buffers() {
  static AdamBuffers buffers;
  return buffers;
}

void count_bytes(benchmark::State& state, int64_t bytes_per_element) {
  state.SetBytesProcessed(state.iterations() * kNumel * bytes_per_element);
}

/// Reads and writes in place as the step does, with one multiply-add an element. 12 bytes each.
void triad(benchmark::State& state) {
  float* a = adam_buffers().master.mutable_data_ptr<float>();
  const float* b = adam_buffers().gradient.const_data_ptr<float>();
  for (auto step : state) {
#pragma GCC ivdep
    for (int64_t i = 0; i < kNumel; ++i) a[i] = a[i] * 0.5f + b[i];
    benchmark::ClobberMemory();
  }
  count_bytes(state, 12);
}

/// The step's own seven streams, four read and three written, with next to no arithmetic. 28 bytes each.
void seven_streams(benchmark::State& state) {
  float* p = adam_buffers().master.mutable_data_ptr<float>();
  float* m = adam_buffers().exp_avg.mutable_data_ptr<float>();
  float* v = adam_buffers().exp_avg_sq.mutable_data_ptr<float>();
  const float* g = adam_buffers().gradient.const_data_ptr<float>();
  for (auto step : state) {
#pragma GCC ivdep
    for (int64_t i = 0; i < kNumel; ++i) {
      p[i] = p[i] * 0.5f + g[i];
      m[i] = m[i] * 0.5f + g[i];
      v[i] = v[i] * 0.5f + g[i];
    }
    benchmark::ClobberMemory();
  }
  count_bytes(state, 28);
}

/// The steps of a rule with the table's hyper-parameters; an undefined `param` is fp32 training.
void run_steps(benchmark::State& state, const char* type, const std::vector<Tensor>& states, const Tensor& param) {
  const AdamBuffers& b = adam_buffers();
  const deeptide::optim::Rule& rule = deeptide::optim::find_rule(type);
  const deeptide::Hyperparameters defaults(type);
  int64_t t = 0;
  std::vector<Tensor> all = states;
  all.resize(rule.roles().size());  // what the defaults do not keep stays undefined
  for (auto step : state) rule.step({b.master, all, b.gradient, param}, defaults, {++t, 1.0});
  const int64_t streams =
      3 + 2 * static_cast<int64_t>(states.size());  // the master and each state are read and written
  count_bytes(state, 4 * streams + (param.defined() ? 2 : 0));
}

void adam_step(benchmark::State& state) {
  run_steps(state, "AdamW", {adam_buffers().exp_avg, adam_buffers().exp_avg_sq}, Tensor());
}

void lion_step(benchmark::State& state) { run_steps(state, "Lion", {adam_buffers().exp_avg}, Tensor()); }

void adagrad_step(benchmark::State& state) { run_steps(state, "Adagrad", {adam_buffers().exp_avg_sq}, Tensor()); }

void rmsprop_step(benchmark::State& state) { run_steps(state, "RMSprop", {adam_buffers().exp_avg_sq}, Tensor()); }

/// Two passes: 40 bytes, not the 28 that are counted for its streams.
void lamb_step(benchmark::State& state) {
  run_steps(state, "Lamb", {adam_buffers().exp_avg, adam_buffers().exp_avg_sq}, Tensor());
}

void adam_step_bf16(benchmark::State& state) {
  static const Tensor param = on_large_pages(kNumel, at::kBFloat16, 0);
  run_steps(state, "AdamW", {adam_buffers().exp_avg, adam_buffers().exp_avg_sq}, param);
}

void torch_fused_adamw(benchmark::State& state) {
  const AdamBuffers& b = adam_buffers();
  const Tensor t = at::zeros({});
  for (auto step : state) {
    t.add_(1);
    at::_fused_adamw_({b.master}, {b.gradient}, {b.exp_avg}, {b.exp_avg_sq}, {}, {t}, 1e-3, 0.9, 0.999, 0.0, 1e-8,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
  count_bytes(state, 28);
}

/// Two ranks' contributions into a third buffer: 12 bytes per element in fp32, 8 in bf16.
void ordered_sum(benchmark::State& state, at::ScalarType dtype) {
  const Tensor rows = on_large_pages(2 * kNumel, dtype, 0.5).view({2, kNumel});
  const Tensor accumulator = adam_buffers().master, squares = at::zeros({1}, at::kDouble);
  const auto by_rank = rows.unbind(0);
  for (auto step : state) deeptide::numerics::ordered_sum(by_rank, 0.5, true, accumulator, squares);
  count_bytes(state, 4 + 2 * static_cast<int64_t>(c10::elementSize(dtype)));
}

void copy(benchmark::State& state) {
  for (auto step : state) {
    std::memcpy(adam_buffers().master.mutable_data_ptr(), adam_buffers().gradient.const_data_ptr(), kNumel * 4);
    benchmark::ClobberMemory();
  }
  count_bytes(state, 8);
}

BENCHMARK(triad)->Unit(benchmark::kMillisecond);
BENCHMARK(seven_streams)->Unit(benchmark::kMillisecond);
BENCHMARK(adam_step)->Unit(benchmark::kMillisecond);
BENCHMARK(adam_step_bf16)->Unit(benchmark::kMillisecond);
BENCHMARK(lion_step)->Unit(benchmark::kMillisecond);
BENCHMARK(adagrad_step)->Unit(benchmark::kMillisecond);
BENCHMARK(rmsprop_step)->Unit(benchmark::kMillisecond);
BENCHMARK(lamb_step)->Unit(benchmark::kMillisecond);
BENCHMARK(torch_fused_adamw)->Unit(benchmark::kMillisecond);
BENCHMARK(copy)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(ordered_sum, fp32, at::kFloat)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(ordered_sum, bf16, at::kBFloat16)->Unit(benchmark::kMillisecond);

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
