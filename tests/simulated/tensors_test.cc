// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Operators on simulated tensors give the CPU's bits, later than the call returns; memory is the device's alone.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include "simulated/streams.h"

namespace deeptide::simulated {
namespace {

using at::Tensor;

/// Loss and gradients of an attention layer between an embedding and a head, on `device`.
std::vector<Tensor> gradients_on(at::Device device, at::ScalarType dtype) {
  constexpr int64_t kVocab = 31, kWidth = 16, kLength = 6;
  const auto generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.unsafeGetGeneratorImpl()->set_current_seed(7);
  std::vector<Tensor> weights;
  const auto weight = [&](at::IntArrayRef sizes) {
    weights.push_back(at::randn(sizes).to(dtype).to(device).requires_grad_());
    return weights.back();
  };
  const Tensor embed = weight({kVocab, kWidth}), scale = weight({kWidth}), shift = weight({kWidth});
  const Tensor qkv = weight({3 * kWidth, kWidth}), bias = weight({3 * kWidth}), head = weight({kVocab, kWidth});
  const Tensor tokens = at::randint(kVocab, {2, kLength}).to(device),
               targets = at::randint(kVocab, {2 * kLength}).to(device);
  Tensor x = at::layer_norm(at::embedding(embed, tokens), {kWidth}, scale, shift);
  const auto parts = at::linear(x, qkv, bias).view({2, kLength, 3, 4, kWidth / 4}).permute({2, 0, 3, 1, 4}).unbind();
  // Not torch's fused attention, which has another kernel on the CPU than elsewhere.
  const Tensor scores = at::softmax(at::matmul(parts[0], parts[1].transpose(-1, -2)), -1);
  const Tensor y = at::matmul(scores, parts[2]);
  x = x + y.transpose(1, 2).reshape({2, kLength, kWidth});
  const Tensor loss = at::cross_entropy_loss(at::linear(x, head).view({2 * kLength, kVocab}).to(at::kFloat), targets);
  auto results = torch::autograd::grad({loss}, weights);
  results.push_back(loss.detach());
  return results;
}

class Tensors : public EverySchedule {};

TEST_P(Tensors, HaveTheCpusGradients) {
  at::set_num_threads(1);  // sums depend on it
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto expected = gradients_on(at::kCPU, dtype), got = gradients_on(simulated_device(), dtype);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(on_device(got[i]));
      EXPECT_TRUE(at::equal(got[i].cpu(), expected[i])) << dtype << " " << i;
    }
  }
}

TEST_P(Tensors, EndInAnOutOfMemoryErrorBeyondTheCap) {
  guard().synchronizeDevice(0);
  Settings settings;
  Machine::instance().reset_peak();
  const size_t used = Machine::instance().stats().used_bytes;
  settings.cap_bytes = used + (1 << 20);
  configure(settings);
  {
    const Tensor half = empty_simulated({1 << 19}, at::kByte);
    EXPECT_THROW(empty_simulated({(1 << 19) + 1}, at::kByte), c10::OutOfMemoryError);
    EXPECT_EQ(Machine::instance().stats().used_bytes, used + (1 << 19));
  }
  empty_simulated({1 << 20}, at::kByte);
  EXPECT_EQ(Machine::instance().stats().used_bytes, used);
  EXPECT_EQ(Machine::instance().stats().peak_bytes, settings.cap_bytes);
}

TEST_P(Tensors, ResizeAndShareStorages) {
  Tensor x = at::arange(10, at::TensorOptions().dtype(at::kFloat).device(simulated_device()));
  Tensor part = empty_simulated({0});
  part.set_(x.storage(), 2, {3}, {2});
  EXPECT_EQ(part.sum().item<float>(), 2 + 4 + 6);
  x.resize_({20});
  EXPECT_EQ(x.narrow(0, 0, 10).sum().item<float>(), 45);
  EXPECT_EQ(x.narrow(0, 0, 10).masked_select(x.narrow(0, 0, 10) > 6).sum().item<float>(), 7 + 8 + 9);
}

INSTANTIATE_TEST_SUITE_P(Schedules, Tensors, every_schedule(), schedule_name);

TEST(Operators, ReturnBeforeTheyRan) {
  Settings settings;
  settings.schedule = Schedule::late;
  Machine::instance().configure(settings);
  Tensor x = at::zeros({8}, at::TensorOptions().device(simulated_device()));
  Machine::instance().host_waits();
  const auto before = Machine::instance().stats().tasks;
  for (int i = 0; i < 8; ++i) x += 1;
  EXPECT_EQ(Machine::instance().stats().tasks, before + 8);
  const auto event = recorded(default_stream());
  EXPECT_TRUE(Machine::instance().host_waits().empty());
  event.synchronize();
  EXPECT_TRUE(event.query());
  EXPECT_EQ(x.sum().item<float>(), 64);
  const std::vector<std::string> waits{"event synchronize", "_local_scalar_dense"};
  EXPECT_EQ(Machine::instance().host_waits(), waits);
  Machine::instance().configure({});
}

TEST(DeviceMemoryDeathTest, CannotBeTouchedByTheHost) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto read = [] {
    const Tensor x = at::zeros({4}, at::TensorOptions().device(simulated_device()));
    return *static_cast<const volatile float*>(x.const_data_ptr()) > 0;
  };
  EXPECT_DEATH(read(), "host code touched memory of the simulated device");
}

TEST(PinnedMemoryDeathTest, CannotBeReadWhileATaskWritesIt) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto read = [](bool waits) {
    Settings settings;
    settings.schedule = Schedule::late;
    settings.guard_pinned = true;
    Machine::instance().configure(settings);
    Tensor host = at::zeros({8192}, at::TensorOptions().pinned_memory(true));
    host.copy_(at::zeros({8192}, at::TensorOptions().device(simulated_device())), /*non_blocking=*/true);
    if (waits) guard().synchronizeDevice(0);
    return host.sum().item<float>();
  };
  EXPECT_DEATH(read(false), "host code touched pinned memory that a pending task uses");
  EXPECT_EQ(read(true), 0);
  EXPECT_EQ(Machine::instance().settle(), "");
  Machine::instance().configure({});
}

}  // namespace
}  // namespace deeptide::simulated
