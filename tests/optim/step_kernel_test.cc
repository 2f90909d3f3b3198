// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The kernel of the step beside the CPU's vector code, of which it has every bit, and beside ATen's operators.
#include "optim/kernels/step_kernel.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <hwy/targets.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>
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

/// The variants of a rule that have a kernel.
std::vector<Hyperparameters> variants_with_kernels(const Rule& rule) {
  std::vector<Hyperparameters> found = variants_of(rule);
  std::erase_if(found, [&](const Hyperparameters& hyper) { return !rule.kernel_update(hyper, {}); });
  return found;
}

/// The rules that have one.
std::vector<const Rule*> rules_with_kernels() {
  std::vector<const Rule*> found = all_rules();
  std::erase_if(found, [](const Rule* rule) { return variants_with_kernels(*rule).empty(); });
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
      for (const Hyperparameters& hyper : variants_with_kernels(*rule)) visit(*rule, hyper);
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
  EXPECT_EQ(names, (std::vector<std::string>{"Adagrad", "Adam", "Lion", "Muon", "OneBitAdam", "RMSprop", "SGD",
                                             "ZeroOneAdam"}));
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
          ASSERT_TRUE(detail::takes_gradient(got));
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
  EXPECT_TRUE(detail::takes_gradient(segment));
  Segment shifted_master = segment, odd_begin = segment, half = segment, many = segment;
  shifted_master.master = shifted(at::randn({96}), 1);
  odd_begin.gradient.pieces[1].begin = 60;
  half.gradient.pieces = {{0, at::randn({96}).to(at::kBFloat16)}};  // for a master that is the parameter
  many.gradient.pieces.assign(65, {0, at::randn({1})});
  for (const Segment& one : {shifted_master, odd_begin, half, many}) EXPECT_FALSE(detail::takes_gradient(one));
  odd_begin.gradient = segment.gradient.narrow(4, 92);
  EXPECT_FALSE(detail::takes_gradient(odd_begin)) << "the second begins within a packet";
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

/// A master and the forms in which packets take it.
enum class Form : uint8_t { whole, with_bf16, with_fp16, packed };

/// A segment of which some come before, and what it needs besides.
struct Narrow {
  static constexpr int64_t kFirst = 16;

  /// With `bits`, what lies halfway is noted there, as on devices.
  Narrow(const Segment& whole, Form form, bool rounds, c10::DeviceType place, const Tensor& bits = {})
      : halfway(bits.defined() ? std::make_unique<numerics::HalfwayBits>(bits)
                               : std::make_unique<numerics::HalfwayBits>(kFirst + whole.master.numel())),
        segment(changed(whole, whole.gradient, [&](const Tensor& tensor) { return tensor.clone().to(place); })) {
    if (rounds) {
      for (Tensor& state : segment.states) state = state.defined() ? state.to(at::kBFloat16) : state;
      segment.rounding = {.seed = 17, .first = (int64_t{1} << 32) - 33};
    }
    if (form == Form::packed) {
      segment.low = at::zeros_like(segment.master, at::kShort);
      segment.halfway = halfway.get();
      segment.first = kFirst;
      const Tensor values = std::exchange(segment.master, at::zeros_like(segment.master, at::kBFloat16));
      numerics::pack(values, {segment.master, segment.low, halfway.get(), kFirst});
    } else if (form != Form::whole) {
      segment.param = at::zeros_like(segment.master, form == Form::with_fp16 ? at::kHalf : at::kBFloat16);
    }
  }
  Tensor master() const {
    if (!segment.low.defined()) return segment.master.cpu();
    const Tensor values = at::empty_like(segment.master, at::kFloat);
    numerics::unpack({segment.master, segment.low, segment.halfway, segment.first}, values);
    return values.cpu();
  }

  static Tensor bits_for(int64_t numel, c10::DeviceType place) {
    return at::zeros({(kFirst + numel + 7) / 8}, at::TensorOptions(place).dtype(at::kByte));
  }

  std::unique_ptr<numerics::HalfwayBits> halfway;
  Segment segment;
};

/// Masters that lie halfway between two numbers of bf16, above and below what they round to, and that a step may leave.
void put_halfway(const Segment& segment) {
  const int64_t count = std::min<int64_t>(segment.master.numel(), 100);
  const Tensor bits = at::arange(count, at::kInt).mul_(0x10000).add_(0x3F808000);
  segment.master.narrow(0, 0, count).copy_(bits.view(at::kFloat));
  for (const Tensor& state : segment.states) {
    if (state.defined()) state.narrow(0, 0, count).zero_();
  }
}

Contributions narrow_gradient(int kind, int64_t numel) {
  const Tensor values = at::randn({numel});
  values.narrow(0, 0, std::min<int64_t>(numel, 90)).zero_();
  if (kind == 2) return {{{0, values.narrow(0, 0, numel / 16 * 8)}}, numel, 0.5};  // the rest is zero
  return {{kind == 0 ? values : values.to(at::kBFloat16)}, 0.5};
}

TEST_P(StepKernel, StepsPackedMastersAndStatesThatAreRoundedStochastically) {
  SKIP_UNLESS_VECTORS_FUSE();
  at::manual_seed(9);
  const auto step = [&](const Rule& rule, const Hyperparameters& hyper, const Segment& segment, int64_t number) {
    ASSERT_TRUE(detail::takes_gradient(segment));
    if (on_gpu()) return rule.step(segment, hyper, {number, 0.37});
    const StepTerms terms{number, 0.37};
    host_kernels::step(detail::step_arguments(segment, terms, rule.kernel_update(hyper, terms).value()), nullptr);
  };
  each_variant([&](const Rule& rule, const Hyperparameters& hyper) {
    for (const Form form : {Form::whole, Form::with_bf16, Form::with_fp16, Form::packed}) {
      for (const bool rounds : {false, true}) {
        if (rounds && !rule.needs_fp32_states(hyper).empty()) continue;
        for (const int64_t numel : {1, 7, 8, 9, 2047, 6161}) {
          const Segment start = make_segment(rule, hyper, numel);
          put_halfway(start);
          const Narrow got(start, form, rounds, GetParam(), Narrow::bits_for(numel, GetParam()));
          const Narrow want(start, form, rounds, at::kCPU);
          for (const int64_t number : {1, 2, 3}) {
            const bool halves = form == Form::packed || form == Form::with_bf16;
            const Contributions gradient = narrow_gradient(static_cast<int>(number) % (halves ? 3 : 1), numel);
            Segment by_kernel = got.segment, by_vectors = want.segment;
            by_vectors.gradient = gradient.joined();
            rule.step(by_vectors, hyper, {number, 0.37});
            by_kernel.gradient = gradient;
            for (Tensor& row : by_kernel.gradient.rows) row = there(row);
            for (auto& piece : by_kernel.gradient.pieces) piece.values = there(piece.values);
            step(rule, hyper, by_kernel, number);
          }
          ASSERT_TRUE(same_numbers(got.master(), want.master())) << rule.name() << " of " << numel;
          const auto numbers = written(got.segment), expected = written(want.segment);
          for (size_t i = 0; i < expected.size(); ++i) {
            ASSERT_TRUE(same_numbers(here(numbers[i]), expected[i]))
                << rule.name() << ", tensor " << i << " of " << numel;
          }
        }
      }
    }
  });
}

TEST(StepKernels, TakeOneRowOfPackedMastersAndSumTheOthersFirst) {
  const Rule& adam = find_rule("AdamW");
  const Hyperparameters hyper = variants_of(adam).at(0);
  const Narrow narrow(make_segment(adam, hyper, 64), Form::packed, /*rounds=*/true, at::kCPU,
                      Narrow::bits_for(64, at::kCPU));
  Segment segment = narrow.segment;
  segment.gradient = {{at::randn({64}).to(at::kBFloat16)}, 0.5};
  EXPECT_TRUE(detail::takes_gradient(segment));
  segment.gradient.rows.push_back(at::randn({64}).to(at::kBFloat16));
  EXPECT_FALSE(detail::takes_gradient(segment));
  EXPECT_TRUE(at::equal(detail::nearer_gradient(segment.gradient).rows[0], segment.gradient.sum()));
  segment.gradient = shifted(at::randn({64}), 1);
  EXPECT_FALSE(detail::takes_gradient(segment));
  segment.gradient = detail::nearer_gradient(segment.gradient);
  EXPECT_TRUE(detail::takes_gradient(segment)) << "a copy begins where packets do";
}

TEST(StepKernels, LeaveOtherDevicesToAten) {
  const Rule& adam = find_rule("AdamW");
  EXPECT_FALSE(detail::has_step_kernel(make_segment(adam, variants_of(adam).at(0), 10)));
}

DEEPTIDE_AT_KERNEL_PLACES(StepKernel);

}  // namespace
}  // namespace deeptide::optim
