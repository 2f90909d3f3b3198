// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The kernel of the bucket copies: many tensors in and out, of any types and sizes, in as few launches as there are
// 64s.
#include "numerics/kernels/copy_kernel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <vector>

#include "kernel_modes.h"
#include "kernel_places.h"
#include "numerics/kernels/copies.h"

using at::Tensor;

namespace deeptide::numerics {
namespace {

constexpr at::ScalarType kCopied[] = {at::kFloat, at::kBFloat16, at::kHalf};

class CopyKernel : public KernelPlaces {
 protected:
  /// Returns the number of launches on the host.
  static int64_t run(at::TensorList from, at::TensorList to) {
    int64_t launches = 0;
    if (on_gpu()) {
      copy_all(from, to);
    } else {
      detail::copy_in_batches(from, to, [&](const kernel::CopyArguments& batch) {
        host_kernels::copy(batch, nullptr);
        ++launches;
      });
    }
    return launches;
  }
};

/// A bucket of all of them, each behind a gap, and its views.
struct Bucket {
  Bucket(const std::vector<Tensor>& tensors, at::ScalarType dtype, at::DeviceType device) {
    int64_t numel = 3;
    for (const Tensor& tensor : tensors) numel += tensor.numel() + 3;
    data = at::zeros({numel}, at::TensorOptions(dtype).device(device));
    int64_t begin = 3;
    for (const Tensor& tensor : tensors) {
      views.push_back(data.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
      begin += tensor.numel() + 3;
    }
  }
  Tensor data;
  std::vector<Tensor> views;
};

TEST_P(CopyKernel, EqualsCopiesOneByOne) {
  at::manual_seed(1);
  for (at::ScalarType from : kCopied) {
    for (at::ScalarType to : kCopied) {
      std::vector<Tensor> tensors;
      for (int64_t k = 0; k < 150; ++k) tensors.push_back(there(at::randn({k % 7, (k * 37) % 101}).to(from)));
      const Bucket got(tensors, to, GetParam()), want(tensors, to, GetParam());
      const int64_t launches = run(tensors, got.views);
      for (size_t k = 0; k < tensors.size(); ++k) want.views[k].copy_(tensors[k]);
      EXPECT_TRUE(same_numbers(here(got.data), here(want.data))) << from << " to " << to;
      EXPECT_EQ(launches, on_gpu() ? 0 : 3);

      std::vector<Tensor> back;
      for (const Tensor& tensor : tensors) back.push_back(at::empty(tensor.sizes(), tensor.options()));
      run(got.views, back);
      for (size_t k = 0; k < tensors.size(); ++k) {
        EXPECT_TRUE(same_numbers(here(back[k]), here(want.views[k].to(from)))) << k;
      }
    }
  }
}

TEST_P(CopyKernel, KeepsTheBitsOfNaNsWhereTypesAreEqual) {
  const Tensor from = there(at::randn({4}));
  from.view(at::kInt)[1] = 0x7FA12345;
  from[2] = -std::numeric_limits<float>::infinity();
  const Tensor to = there(at::zeros({4}));
  run(from, to);
  EXPECT_TRUE(at::equal(from.view(at::kInt), to.view(at::kInt)));
}

TEST_P(CopyKernel, LeavesToAtenWhatItDoesNotTake) {
  at::manual_seed(2);
  const Tensor transposed = there(at::randn({3, 5})).t(), wide = there(at::randn({4}).to(at::kDouble)),
               large = there(at::randn({(1 << 20) + 1})), small = there(at::randn({2}));
  const std::vector<Tensor> from{transposed, wide, large, small};
  std::vector<Tensor> to;
  for (const Tensor& tensor : from) to.push_back(there(at::zeros(tensor.sizes())));
  const int64_t launches = run(from, to);
  for (size_t k = 0; k < from.size(); ++k) EXPECT_TRUE(at::equal(to[k], from[k].to(at::kFloat))) << k;
  EXPECT_EQ(launches, on_gpu() ? 0 : 1);
}

TEST_P(CopyKernel, TakesNoTensorsAndEmptyOnes) {
  EXPECT_EQ(run({}, {}), 0);
  const Tensor none = there(at::zeros({0})), one = there(at::randn({1})), target = there(at::zeros({1}));
  run({none, one, none}, {there(at::zeros({0})), target, there(at::zeros({0}))});
  EXPECT_TRUE(at::equal(one, target));
}

DEEPTIDE_AT_KERNEL_PLACES(CopyKernel);

TEST(Copies, WantsAsManySourcesAsTargets) {
  try {
    copy_all({at::zeros({1})}, {});
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("got 1 sources, expected 0"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace deeptide::numerics
