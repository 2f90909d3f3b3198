// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Checks what every supported version of torch does, with what the library adds to the older ones.
#include "device/torch_versions.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <gtest/gtest.h>

namespace deeptide::device {
namespace {

using at::Tensor;

TEST(KeptArguments, OutliveABoxedCallThatReturnsThem) {
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::max", "dim_max");
  Tensor values = at::empty({0}), places = at::empty({0}, at::kLong);
  // They keep the tensors' own memory, so that a result that was let go of shows as one without a storage.
  const Weak weak_values(values.getIntrusivePtr()), weak_places(places.getIntrusivePtr());
  std::vector<c10::IValue> stack{at::arange(6, at::kFloat).view({2, 3}), 1, false, std::move(values),
                                 std::move(places)};
  {
    const KeptArguments kept(stack);
    op.callBoxed(stack);
  }
  ASSERT_EQ(stack.size(), 2);
  for (const c10::IValue& result : stack) ASSERT_TRUE(result.toTensor().storage());
  EXPECT_EQ(stack[0].toTensor()[1].item<float>(), 5);
  EXPECT_EQ(stack[1].toTensor()[1].item<int64_t>(), 2);
}

}  // namespace
}  // namespace deeptide::device
