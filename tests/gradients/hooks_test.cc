// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Each gradient is caught once per backward, for as long as the hooks live and no longer.
#include "gradients/hooks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <memory>

namespace deeptide::gradients {
namespace {

using at::Tensor;

Tensor parameter(float value, at::ScalarType dtype = at::kFloat) {
  return at::full({3}, value, dtype).set_requires_grad(true);
}

void backward(const Tensor& loss) { torch::autograd::backward({loss}, {at::ones_like(loss)}); }

struct Nothing : torch::autograd::FunctionPostHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    return outputs;
  }
};

class Hooks : public testing::Test {
 protected:
  GradientHooks::Sink sink() {
    return [this](int index, const Tensor& gradient) { seen_[index].push_back(gradient.sum().item<float>()); };
  }
  std::map<int, std::vector<float>> seen_;
  Tensor p_ = parameter(2), q_ = parameter(3), unused_ = parameter(4);
};

TEST_F(Hooks, CatchEachGradientOnceAndDropIt) {
  const GradientHooks hooks({p_, q_, unused_}, sink());
  backward((p_ * q_ + p_).sum());  // p_ is used twice
  EXPECT_EQ(seen_[0], std::vector<float>{12});
  EXPECT_EQ(seen_[1], std::vector<float>{6});
  EXPECT_EQ(seen_.count(2), 0u) << "an unused parameter has none";
  EXPECT_FALSE(p_.grad().defined());
  EXPECT_FALSE(q_.grad().defined());
}

TEST_F(Hooks, CatchEveryBackwardSeparately) {
  const GradientHooks hooks({p_}, sink());
  backward((p_ * 5).sum());
  backward((p_ * 7).sum());
  EXPECT_EQ(seen_[0], (std::vector<float>{15, 21}));
}

TEST_F(Hooks, KnowWhetherAnybodyElseAsksForAGradient) {
  const Tensor filled = parameter(5), replaced = parameter(6);
  const GradientHooks hooks({p_, q_, unused_, filled, replaced}, sink());
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(hooks.is_alone(i));
  p_.register_hook([](const Tensor& gradient) { return gradient * 2; });
  torch::autograd::impl::grad_accumulator(q_)->add_post_hook(std::make_unique<Nothing>());
  unused_.set_requires_grad(false);
  filled.mutable_grad() = at::zeros({3});
  replaced.set_data(at::zeros({3}, at::kDouble));
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(hooks.is_alone(i)) << i;
  const GradientHooks asked({parameter(1)}, sink(), [] {});
  EXPECT_FALSE(asked.is_alone(0)) << "somebody is called before";
}

TEST_F(Hooks, SurviveUntilTheyAreDestroyedAndAreSilentAfterwards) {
  {
    const GradientHooks hooks({p_}, sink());
    backward(p_.sum());
  }
  const Tensor loss = (p_ * 2).sum();
  backward(loss);
  EXPECT_EQ(seen_[0], std::vector<float>{3});
  ASSERT_TRUE(p_.grad().defined()) << "autograd is itself again";
  EXPECT_EQ(p_.grad().sum().item<float>(), 6);
}

TEST_F(Hooks, AreSilentWhenDestroyedBetweenForwardAndBackward) {
  auto hooks = std::make_unique<GradientHooks>(std::vector<Tensor>{p_}, sink());
  const Tensor loss = p_.sum();
  hooks.reset();
  backward(loss);
  EXPECT_TRUE(seen_.empty());
  EXPECT_TRUE(p_.grad().defined());
}

/// Another type and back makes a new accumulator: until the hooks follow, gradients stay in `.grad`.
TEST_F(Hooks, FollowAnAccumulatorThatWasReplaced) {
  GradientHooks hooks({p_, q_}, sink());
  EXPECT_EQ(hooks.follow(), (std::vector<bool>{false, false}));
  const Tensor kept = p_.detach();
  p_.set_data(p_.detach().to(at::kDouble));
  p_.set_data(kept);
  backward((p_ * q_).sum());
  EXPECT_TRUE(seen_[0].empty());
  EXPECT_TRUE(p_.grad().defined());
  EXPECT_EQ(hooks.follow(), (std::vector<bool>{true, false}));
  p_.mutable_grad().reset();
  backward((p_ * q_).sum());
  EXPECT_EQ(seen_[0], std::vector<float>{9});
  EXPECT_EQ(seen_[1], (std::vector<float>{6, 6}));
  EXPECT_EQ(hooks.follow(), (std::vector<bool>{false, false}));
}

TEST_F(Hooks, LetASecondSetTakeOver) {
  {
    const GradientHooks first({p_}, [](int, const Tensor&) { FAIL() << "the first set is gone"; });
  }
  const GradientHooks second({p_}, sink());
  backward(p_.sum());
  EXPECT_EQ(seen_[0], std::vector<float>{3});
}

TEST_F(Hooks, IgnoreGradientsThatAreOnlyAskedFor) {
  const GradientHooks hooks({p_}, sink());
  const Tensor loss = (p_ * p_).sum();
  const auto gradients = torch::autograd::grad({loss}, {p_});
  EXPECT_EQ(gradients.front().sum().item<float>(), 12);
  EXPECT_TRUE(seen_.empty());
}

TEST_F(Hooks, PassTheSinksExceptionToTheCallerOfBackward) {
  const GradientHooks hooks({p_}, [](int, const Tensor&) { throw std::runtime_error("no room for this gradient"); });
  const Tensor loss = p_.sum();
  try {
    backward(loss);
    FAIL() << "the exception was lost";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("no room for this gradient"), std::string::npos) << error.what();
  }
}

TEST_F(Hooks, HandOverHalfPrecisionAsItIs) {
  const Tensor half = parameter(1, at::kBFloat16);
  at::ScalarType type = at::kFloat;
  const GradientHooks hooks({half}, [&](int, const Tensor& gradient) { type = gradient.scalar_type(); });
  backward(half.sum());
  EXPECT_EQ(type, at::kBFloat16);
}

TEST(GradientHooks, OutliveTheirParameters) {
  int calls = 0;
  Tensor p = parameter(1);
  const GradientHooks hooks({p}, [&](int, const Tensor&) { ++calls; });
  backward(p.sum());
  p.reset();
  EXPECT_EQ(calls, 1);
}

TEST(GradientHooks, RefuseWhatIsNoLeaf) {
  EXPECT_ANY_THROW(GradientHooks({at::zeros({2})}, [](int, const Tensor&) {}));
}

}  // namespace
}  // namespace deeptide::gradients
