// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The kernel of the step beside the CPU's vector code, of which it has every bit, and beside ATen's operators.
#include "optim/updates/step_kernel.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <hwy/targets.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "kernel_modes.h"
#include "kernel_places.h"
#include "optim/rules/elementwise.h"
#include "optim/rules/step_device.h"
#include "optim/segments.h"
#include "pieces.h"

using at::Tensor;

namespace deeptide::optim {
namespace {

using numerics::Contributions;

constexpr int64_t kSizes[] = {0, 1, 7, 255, 256, 257, 1000, 4097};
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

/// The rules that have a kernel.
std::vector<const Rule*> rules_with_kernels() {
  std::vector<const Rule*> found;
  for (const Rule* rule : all_rules()) {
    if (rule->kernel_update(variants_of(*rule).at(0), {})) found.push_back(rule);
  }
  return found;
}

/// Rows of a gradient, at any alignment.
Contributions rows_of_ranks(int world, int64_t numel, at::ScalarType dtype) {
  std::vector<Tensor> rows;
  for (int rank = 0; rank < world; ++rank) rows.push_back(shifted(at::randn({numel}), 1).to(dtype));
  return {rows, world == 1 && dtype == at::kFloat ? 1.0 : 1.0 / world};
}

class StepKernel : public KernelPlaces {
 protected:
  /// The segment after a step by the kernel, on the host again.
  static Segment run(const Rule& rule, const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) {
    std::vector<Tensor> rows;
    for (const Tensor& row : segment.gradient.rows) rows.push_back(there(row));
    const Segment own =
        changed(segment, {rows, segment.gradient.scale}, [](const Tensor& tensor) { return there(tensor.clone()); });
    if (on_gpu()) {
      EXPECT_TRUE(detail::has_step_kernel(own));
      rule.step(own, hyper, terms);
    } else {
      host_kernels::step(detail::step_arguments(own, terms, rule.kernel_update(hyper, terms).value()), nullptr);
    }
    return changed(own, segment.gradient, [](const Tensor& tensor) { return here(tensor); });
  }

  static void compare(const Rule& rule, const Segment& segment, const Hyperparameters& hyper, const StepTerms& terms) {
    const Segment want = copy_of(segment);
    rule.step(want, hyper, terms);
    const auto got = written(run(rule, segment, hyper, terms)), expected = written(want);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(same_numbers(got[i], expected[i])) << rule.name() << ", tensor " << i << " of " << got[i].numel();
    }
  }

  /// Calls `visit(rule, hyper)` for every variant of every rule that has a kernel.
  template <typename Visit>
  static void each_variant(Visit visit) {
    for (const Rule* rule : rules_with_kernels()) {
      for (const Hyperparameters& hyper : variants_of(*rule)) visit(*rule, hyper);
    }
  }
};

bool fuses() { return std::string(kernel_target()) != "SSE2" && std::string(kernel_target()).substr(0, 3) != "EMU"; }

#define SKIP_UNLESS_VECTORS_FUSE() \
  if (!fuses()) GTEST_SKIP() << kernel_target() << " has no fused multiply-add: it rounds products on their own"

TEST(StepKernels, AreThereForTheRulesThatTheDocumentationNames) {
  std::vector<std::string> names;
  for (const Rule* rule : rules_with_kernels()) names.push_back(rule->name());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names,
            (std::vector<std::string>{"Adagrad", "Adam", "Lion", "OneBitAdam", "RMSprop", "SGD", "ZeroOneAdam"}));
}

TEST_P(StepKernel, EqualsTheCpusVectorsBitForBit) {
  SKIP_UNLESS_VECTORS_FUSE();
  at::manual_seed(1);
  each_variant([](const Rule& rule, const Hyperparameters& hyper) {
    for (int64_t numel : kSizes) {
      for (at::ScalarType param : {at::kFloat, at::kBFloat16, at::kHalf}) {
        for (int64_t step : {1, 7}) {
          compare(rule, make_segment(rule, hyper, numel, param, /*offset=*/1), hyper, {step, 0.37});
        }
      }
    }
  });
}

/// Eight elements at a time where memory is aligned, and what is left over one by one: the same bits.
TEST_P(StepKernel, GivesTheSameBitsInPacketsOfEight) {
  SKIP_UNLESS_VECTORS_FUSE();
  at::manual_seed(7);
  each_variant([](const Rule& rule, const Hyperparameters& hyper) {
    for (int64_t numel : {0, 1, 7, 8, 9, 2047, 2048, 6161}) {
      for (at::ScalarType param : {at::kFloat, at::kBFloat16, at::kHalf}) {
        for (at::ScalarType gradient : {at::kFloat, at::kBFloat16, at::kHalf}) {
          Segment segment = make_segment(rule, hyper, numel, param);
          segment.gradient = {{at::randn({numel}).to(gradient)}, 0.25};
          compare(rule, segment, hyper, {3, 0.37});
        }
      }
    }
  });
}

/// Gradients where autograd left them, with gaps between them and behind them: the bits of the bucket that they would
/// make, and a gap is zero there.
TEST_P(StepKernel, TakesAGradientInPieces) {
  SKIP_UNLESS_VECTORS_FUSE();
  at::manual_seed(8);
  const std::vector<std::vector<int64_t>> cases = {{1}, {8, 7}, {3000, 1, 33, 4095}, std::vector<int64_t>(64, 40)};
  each_variant([&](const Rule& rule, const Hyperparameters& hyper) {
    for (const auto& lengths : cases) {
      for (at::ScalarType param : {at::kFloat, at::kBFloat16, at::kHalf}) {
        for (at::ScalarType gradient : {at::kFloat, param}) {
          const Contributions own = random_pieces(lengths, gradient, 0.25, GetParam(), /*before=*/32);
          Segment segment = make_segment(rule, hyper, own.numel, param), want = copy_of(segment);
          want.gradient = {{here(own.joined().rows[0])}, 0.25};
          rule.step(want, hyper, {3, 0.37});
          Segment got = changed(segment, own, [](const Tensor& tensor) { return there(tensor.clone()); });
          ASSERT_TRUE(detail::takes_pieces(got));
          if (on_gpu()) {
            rule.step(got, hyper, {3, 0.37});
          } else {
            host_kernels::step(detail::step_arguments(got, {3, 0.37}, *rule.kernel_update(hyper, {3, 0.37})), nullptr);
          }
          const auto numbers = written(got), expected = written(want);
          for (size_t i = 0; i < expected.size(); ++i) {
            ASSERT_TRUE(same_numbers(here(numbers[i]), expected[i])) << rule.name() << ", tensor " << i;
          }
        }
      }
    }
  });
}

TEST(StepKernels, TakePiecesOnlyWhereTheyBeginAsPacketsDo) {
  const Rule& adam = find_rule("AdamW");
  const Hyperparameters hyper = variants_of(adam).at(0);
  Segment segment = make_segment(adam, hyper, 96);
  segment.gradient = {{{0, at::randn({40})}, {64, at::randn({32})}}, 96, 1.0};
  EXPECT_TRUE(detail::takes_pieces(segment));
  Segment shifted_master = segment, odd_begin = segment, half = segment, many = segment;
  shifted_master.master = shifted(at::randn({96}), 1);
  odd_begin.gradient.pieces[1].begin = 60;
  half.gradient.pieces = {{0, at::randn({96}).to(at::kBFloat16)}};  // for a master that is the parameter
  many.gradient.pieces.assign(65, {0, at::randn({1})});
  for (const Segment& one : {shifted_master, odd_begin, half, many}) EXPECT_FALSE(detail::takes_pieces(one));
  odd_begin.gradient = segment.gradient.narrow(4, 92);
  EXPECT_FALSE(detail::takes_pieces(odd_begin)) << "the second begins within a packet";
}

TEST_P(StepKernel, SumsTheRowsOfRanksOnTheWay) {
  SKIP_UNLESS_VECTORS_FUSE();
  at::manual_seed(2);
  each_variant([](const Rule& rule, const Hyperparameters& hyper) {
    for (int world : {1, 2, 5}) {
      for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        Segment segment = make_segment(rule, hyper, 1000, at::kBFloat16, /*offset=*/3);
        segment.gradient = rows_of_ranks(world, 1000, dtype);
        compare(rule, segment, hyper, {3, 2.0});
      }
    }
  });
}

TEST_P(StepKernel, StepsMastersAndStatesOf16Bits) {
  SKIP_UNLESS_VECTORS_FUSE();
  at::manual_seed(3);
  each_variant([](const Rule& rule, const Hyperparameters& hyper) {
    for (at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      Segment segment = make_segment(rule, hyper, 777);
      segment.master = segment.master.to(dtype);
      for (Tensor& state : segment.states) state = state.defined() ? state.to(dtype) : state;
      compare(rule, segment, hyper, {2, 1.0});
    }
  });
}

TEST_P(StepKernel, CarriesWhatIsNotFiniteAsTheCpuDoes) {
  SKIP_UNLESS_VECTORS_FUSE();
  at::manual_seed(4);
  each_variant([](const Rule& rule, const Hyperparameters& hyper) {
    for (float bad : {kNaN, kInf, -kInf, 0.0f, -0.0f, 1e-41f, 3e38f}) {
      const Segment segment = make_segment(rule, hyper, 64, at::kBFloat16);
      segment.gradient.rows[0].narrow(0, 5, 20).fill_(bad);
      compare(rule, segment, hyper, {1, 1.0});
      segment.master.narrow(0, 30, 9).fill_(bad);
      compare(rule, segment, hyper, {1, 1.0});
    }
  });
}

TEST_P(StepKernel, IsATrainingOfManySteps) {
  SKIP_UNLESS_VECTORS_FUSE();
  at::manual_seed(5);
  each_variant([](const Rule& rule, const Hyperparameters& hyper) {
    Segment by_kernel = make_segment(rule, hyper, 300, at::kHalf), by_vectors = copy_of(by_kernel);
    for (int64_t step = 1; step <= 20; ++step) {
      by_kernel.gradient = by_vectors.gradient = at::randn({300});
      by_kernel = run(rule, by_kernel, hyper, {step, 0.5});
      rule.step(by_vectors, hyper, {step, 0.5});
    }
    EXPECT_TRUE(same_bits(by_kernel, by_vectors)) << rule.name();
  });
}

/// ATen rounds each product before it adds it, on a CPU, and divides in another order: a few last places per step,
/// as between the CPU's vectors and it.
TEST_P(StepKernel, IsWithinRoundingOfAten) {
  at::manual_seed(6);
  each_variant([](const Rule& rule, const Hyperparameters& hyper) {
    const Segment segment = make_segment(rule, hyper, 1000), want = copy_of(segment);
    rule.step_reference(want, hyper, {2, 0.5});
    const auto got = written(run(rule, segment, hyper, {2, 0.5})), expected = written(want);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(at::allclose(got[i], expected[i], 1e-5, 1e-6)) << rule.name() << ", tensor " << i;
    }
  });
}

TEST(StepKernels, LeavePackedMastersAndOtherDevicesToAten) {
  const Rule& adam = find_rule("AdamW");
  const Hyperparameters hyper = variants_of(adam).at(0);
  EXPECT_FALSE(detail::has_step_kernel(make_segment(adam, hyper, 10)));
  Segment packed = make_segment(adam, hyper, 10);
  packed.low = at::zeros({10}, at::kShort);
  EXPECT_FALSE(detail::has_step_kernel(packed));
}

DEEPTIDE_AT_KERNEL_PLACES(StepKernel);

}  // namespace
}  // namespace deeptide::optim
