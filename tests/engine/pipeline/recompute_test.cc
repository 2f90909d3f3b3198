// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Segments that are computed again in backward: the bits of those that are not, and what is kept meanwhile.
#include "deeptide/recompute.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "deeptide/autocast.h"

namespace deeptide::recomputed {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int64_t kWidth = 16;

/// Draws, casts where autocast says so, and uses a parameter.
struct Segment {
  torch::nn::Linear linear{kWidth, kWidth};
  int calls = 0;
  c10::weak_intrusive_ptr<c10::TensorImpl> inner{c10::intrusive_ptr<c10::TensorImpl>()};

  Tensors operator()(const Tensors& inputs) {
    ++calls;
    const Tensor dropped = at::dropout(torch::relu(linear(inputs.at(0))), 0.3, true);
    inner = c10::weak_intrusive_ptr<c10::TensorImpl>(dropped.getIntrusivePtr());
    return {dropped * dropped, torch::arange(3)};
  }
};

Tensor input(bool with_gradient) {
  torch::manual_seed(2);
  return torch::randn({4, kWidth}).set_requires_grad(with_gradient);
}

struct Gradients {
  Tensor output, of_input, of_weight, next_draw;
};

Gradients train(Segment& segment, bool again, bool with_gradient) {
  const Tensor x = input(with_gradient);
  torch::manual_seed(3);
  segment.linear->zero_grad();
  const auto call = [&segment](const Tensors& inputs) { return segment(inputs); };
  const Tensor output = again ? recompute(call, {x}).at(0) : call({x}).at(0);
  const Tensor further = torch::rand({8});  // draws on, as the layers after it do
  (output.to(torch::kFloat).sum() + further.sum()).backward();
  return {output.detach(), x.grad(), segment.linear->weight.grad().clone(), torch::rand({4})};
}

TEST(Recompute, GivesTheBitsOfASegmentThatIsKept) {
  torch::manual_seed(1);
  Segment segment;
  for (const bool with_gradient : {true, false}) {
    const Gradients kept = train(segment, false, with_gradient);
    segment.calls = 0;
    const Gradients again = train(segment, true, with_gradient);
    EXPECT_EQ(segment.calls, 2);
    EXPECT_TRUE(again.output.equal(kept.output));
    EXPECT_TRUE(again.of_weight.equal(kept.of_weight));
    EXPECT_TRUE(again.next_draw.equal(kept.next_draw)) << "backward left other random numbers";
    EXPECT_EQ(again.of_input.defined(), with_gradient);
    if (!with_gradient) continue;
    EXPECT_TRUE(again.of_input.equal(kept.of_input));
  }
}

TEST(Recompute, RunsUnderTheAutocastOfItsForward) {
  torch::manual_seed(1);
  Segment segment;
  const auto under = [&](bool again) {
    const Tensor x = input(true);
    torch::manual_seed(3);
    segment.linear->zero_grad();
    Tensor output;
    {
      const Autocast scope(at::kCPU, at::kBFloat16);
      const auto call = [&segment](const Tensors& inputs) { return segment(inputs); };
      output = again ? recompute(call, {x}).at(0) : call({x}).at(0);
    }
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    output.to(torch::kFloat).sum().backward();
    return segment.linear->weight.grad().clone();
  };
  const Tensor kept = under(false);
  EXPECT_TRUE(under(true).equal(kept));
}

TEST(Recompute, KeepsTheInputsAlone) {
  Segment segment;
  const Tensor x = input(true);
  const auto call = [&segment](const Tensors& inputs) { return segment(inputs); };
  const Tensors kept = call({x});
  EXPECT_FALSE(segment.inner.expired());
  const Tensors outputs = recompute(call, {x});
  EXPECT_TRUE(segment.inner.expired());
  EXPECT_FALSE(outputs.at(1).requires_grad());
}

TEST(Recompute, Nests) {
  torch::manual_seed(1);
  Segment inner;
  Segment outer{inner};
  const Gradients kept = train(outer, false, true);
  Segment nested{inner};
  const auto twice = [&](const Tensors& inputs) {
    return recompute([&](const Tensors& again) { return nested(again); }, inputs);
  };
  const Tensor x = input(true);
  torch::manual_seed(3);
  inner.linear->zero_grad();
  recompute(twice, {x}).at(0).sum().backward();
  EXPECT_TRUE(x.grad().equal(kept.of_input));
  EXPECT_EQ(nested.calls, 3);
}

TEST(Recompute, RefusesWhatWouldBeAnotherSegment) {
  Segment segment;
  const auto call = [&segment](const Tensors& inputs) { return segment(inputs); };
  const Tensor x = input(false);
  const Tensor output = recompute(call, {x}).at(0);
  x.add_(1);
  EXPECT_THROW(output.sum().backward(), std::exception);

  int calls = 0;
  const auto shorter = [&](const Tensors& inputs) {
    return calls++ == 0 ? Tensors{inputs[0] * 2, inputs[0]} : Tensors{inputs[0] * 2};
  };
  const Tensor y = input(true);
  EXPECT_THROW(recompute(shorter, {y}).at(0).sum().backward(), std::exception);
}

TEST(Recompute, IsThePlainCallWithoutGradients) {
  Segment segment;
  const at::NoGradGuard none;
  const Tensors outputs = recompute([&](const Tensors& inputs) { return segment(inputs); }, {input(false)});
  EXPECT_FALSE(outputs.at(0).requires_grad());
  EXPECT_EQ(segment.calls, 1);
}

}  // namespace
}  // namespace deeptide::recomputed
