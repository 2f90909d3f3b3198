// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The kernels of LAMB's passes beside the CPU's vector code, of which they have every bit.
#include "optim/kernels/lamb_kernel.h"

#include <ATen/ops/empty_like.h>
#include <hwy/targets.h>

#include <string>
#include <vector>

#include "kernel_modes.h"
#include "kernel_places.h"
#include "optim/rules/step_device.h"
#include "optim/segments.h"
#include "pieces.h"

using at::Tensor;

namespace deeptide::optim {
namespace {

constexpr StepTerms kTerms{3, 0.37};

class LambKernel : public KernelPlaces {
 protected:
  /// The first pass; returns the ratio that its norms give.
  static double measure(const NormRule& rule, const Segment& segment, const Hyperparameters& hyper) {
    NormSums sums(segment.master.numel());
    if (segment.master.is_cuda()) {
      EXPECT_TRUE(detail::has_lamb_kernel(segment));
      rule.measure(segment, hyper, kTerms, 0, sums);
    } else {
      const Tensor update = at::empty_like(segment.master);
      host_kernels::lamb(detail::lamb_arguments(segment, *rule.kernel_scalars(hyper, kTerms, 1.0), update), nullptr);
      sums.param.add(0, segment.master);
      sums.update.add(0, update);
    }
    return rule.ratio(sums.totals(), hyper);
  }

  static void apply(const NormRule& rule, const Segment& segment, const Hyperparameters& hyper, double ratio) {
    if (segment.master.is_cuda()) return rule.apply(segment, hyper, kTerms, ratio);
    host_kernels::lamb(detail::lamb_arguments(segment, *rule.kernel_scalars(hyper, kTerms, ratio), {}), nullptr);
  }

  /// Both passes; returns the ratio.
  static double step_by_vectors(const NormRule& rule, const Segment& segment, const Hyperparameters& hyper) {
    NormSums sums(segment.master.numel());
    rule.measure(segment, hyper, kTerms, 0, sums);
    const double ratio = rule.ratio(sums.totals(), hyper);
    rule.apply(segment, hyper, kTerms, ratio);
    return ratio;
  }
};

std::vector<numerics::Contributions> lamb_gradients(int64_t numel, c10::DeviceType place) {
  std::vector<numerics::Contributions> all;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    all.push_back({{at::randn({numel}).to(type).to(place)}, 0.25});
  }
  all.push_back(random_pieces({numel}, at::kBFloat16, 0.25, place));  // of more elements, if they end within 32
  return all;
}

TEST_P(LambKernel, EqualsTheCpusVectorsBitForBit) {
  const std::string target = kernel_target();
  if (target == "SSE2" || target.substr(0, 3) == "EMU") GTEST_SKIP() << target << " rounds products on their own";
  at::manual_seed(1);
  for (const char* name : {"Lamb", "OneBitLamb"}) {
    const auto& rule = dynamic_cast<const NormRule&>(find_rule(name));
    for (const Hyperparameters& hyper : variants_of(rule)) {
      for (const int64_t numel : {32, 2048, 6176}) {
        for (const int64_t count : {numel, numel - 1, numel - 25}) {
          for (const at::ScalarType param : {at::kFloat, at::kBFloat16, at::kHalf}) {
            for (const auto& gradient : lamb_gradients(count, GetParam())) {
              const int64_t own = gradient.pieces.empty() ? count : gradient.numel;
              Segment want = make_segment(rule, hyper, own, param);
              want.states[1].narrow(0, 0, own / 2).zero_();  // where 1-bit LAMB takes the mean
              Segment got = changed(want, gradient, [](const Tensor& tensor) { return there(tensor.clone()); });
              want.gradient = gradient.joined();
              for (Tensor& row : want.gradient.rows) row = here(row);
              const double ratio = step_by_vectors(rule, want, hyper);
              ASSERT_NEAR(measure(rule, got, hyper), ratio, 1e-9 * ratio);  // GPUs add squares in another order
              apply(rule, got, hyper, ratio);
              const auto numbers = written(got), expected = written(want);
              for (size_t i = 0; i < expected.size(); ++i) {
                ASSERT_TRUE(same_numbers(here(numbers[i]), expected[i])) << name << ", tensor " << i << " of " << own;
              }
            }
          }
        }
      }
    }
  }
}

DEEPTIDE_AT_KERNEL_PLACES(LambKernel);

}  // namespace
}  // namespace deeptide::optim
