// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs a kernel's tests where it can: its bodies on the host, always, and the kernel itself where there is a GPU.
#pragma once

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isnan.h>
#include <c10/core/DeviceType.h>
#include <gtest/gtest.h>

#include <string>

namespace deeptide {

class KernelPlaces : public testing::TestWithParam<c10::DeviceType> {
 protected:
  void SetUp() override {
    if (on_gpu() && !at::globalContext().hasCUDA()) GTEST_SKIP() << "torch finds no GPU here";
  }
  static bool on_gpu() { return GetParam() == c10::DeviceType::CUDA; }
  /// A copy there, at the same distance from an aligned address; undefined: undefined.
  static at::Tensor there(const at::Tensor& tensor) { return tensor.defined() ? tensor.to(GetParam()) : tensor; }
  static at::Tensor here(const at::Tensor& tensor) { return tensor.defined() ? tensor.cpu() : tensor; }
};

inline std::string name_of_place(const testing::TestParamInfo<c10::DeviceType>& place) {
  return place.param == c10::DeviceType::CUDA ? "Gpu" : "Host";
}

/// Equal bits, but for those of NaNs, which every processor makes in its own way.
inline bool same_numbers(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  const at::Tensor is_nan = at::isnan(a);
  const at::ScalarType bits = a.element_size() == 4 ? at::kInt : at::kShort;
  const auto without = [&](const at::Tensor& x) { return x.masked_fill(is_nan, 0).view(bits); };
  return at::equal(is_nan, at::isnan(b)) && at::equal(without(a), without(b));
}

}  // namespace deeptide

#define DEEPTIDE_AT_KERNEL_PLACES(Suite) \
  INSTANTIATE_TEST_SUITE_P(, Suite, testing::Values(c10::DeviceType::CPU, c10::DeviceType::CUDA), name_of_place)
