// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Eigenvalues of blocks are DeepSpeed's and the Hessian's, and what stands in their way is named.
#include "compression/curvature.h"

#include <gtest/gtest.h>

#include "compression/models.h"
#include "errors.h"

namespace deeptide::compressed {
namespace {

using compression::Curvature;

struct BlocksImpl : torch::nn::Module {
  BlocksImpl() {
    for (uint64_t number = 0; number < 3; ++number) {
      blocks->push_back(with_values(torch::nn::Linear(5, 5), grid({5, 5}, 20 + number), grid({5}, 30 + number)));
    }
    register_module("blocks", blocks);
  }
  Tensor forward(Tensor x) {
    for (const auto& block : *blocks) x = torch::tanh(block->as<torch::nn::Linear>()->forward(x));
    return x.square().mean();
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Blocks);

Json settings(const Json& changes = Json::object()) {
  Json all = {
      {"verbose", false},       {"max_iter", 50}, {"tol", 1e-3}, {"stability", 1e-6}, {"gas_boundary_resolution", 1},
      {"layer_name", "blocks"}, {"layer_num", 3}};
  all.update(changes);
  return all;
}

TEST(Curvature, EigenvaluesAreTheirs) {
  Blocks model;
  torch::manual_seed(5);
  const Tensor loss = model(grid({4, 5}, 40));
  const auto raw = theirs().at("eigenvalues").at("raw").get<std::vector<double>>();
  const Tensor next = torch::rand({3});
  torch::manual_seed(5);
  const auto found = Curvature(settings(), *model).eigenvalues(loss);
  EXPECT_TRUE(torch::rand({3}).equal(next)) << "training draws something else";
  ASSERT_EQ(found.size(), 3);
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(found[i], raw[i], 1e-4 * std::abs(raw[i]));
  for (const Tensor& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
  loss.backward();  // can still run
}

TEST(Curvature, FactorsFollowTheSharesOfBlocks) {
  Blocks model;
  torch::manual_seed(5);
  Curvature curvature(settings({{"gas_boundary_resolution", 2}}), *model);
  const auto factors = [&] {
    std::vector<int64_t> all;
    for (const auto& block : *model->blocks) all.push_back(curvature.factor(*block));
    return all;
  };
  const auto same = [](double value) { return value; };
  curvature.measure(1, model(grid({4, 5}, 40)), same);  // not a second step
  EXPECT_EQ(factors(), (std::vector<int64_t>{1, 1, 1}));
  curvature.measure(2, model(grid({4, 5}, 40)), same);
  std::vector<int64_t> wanted;
  for (const double share : theirs().at("eigenvalues").at("shares").get<std::vector<double>>()) {
    wanted.push_back(1 + static_cast<int64_t>(4 * share));
  }
  EXPECT_EQ(factors(), wanted);
  EXPECT_EQ(curvature.factor(*model), 1) << "in no block";
  curvature.forget();
  EXPECT_EQ(factors(), (std::vector<int64_t>{1, 1, 1}));
}

TEST(Curvature, NamesBlocksThatAreNotThere) {
  Blocks model;
  EXPECT_NE(error_of([&] {
              Curvature(settings({{"layer_name", ""}}), *model);
            }).find("got layer_name '' and layer_num 3"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              Curvature(settings({{"layer_name", "h"}}), *model);
            }).find("the model has no list of 3 layers at 'h'"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              Curvature(settings({{"layer_num", 4}}), *model);
            }).find("the model has no list of 4 layers at 'blocks'"),
            std::string::npos);
}

struct OnceImpl : torch::nn::Module {
  OnceImpl() {
    h->push_back(torch::nn::Linear(8, 8));
    register_module("h", h);
  }
  Tensor forward(const Tensor& x) { return Square::apply((*h)[0]->as<torch::nn::Linear>()->forward(x)).mean(); }
  struct Square : torch::autograd::Function<Square> {
    static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
      context->save_for_backward({x});
      return x.square();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list gradients) {
      return {SquareBackward::apply(gradients[0] * context->get_saved_variables()[0] * 2)};
    }
  };
  struct SquareBackward : torch::autograd::Function<SquareBackward> {
    static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
      TORCH_CHECK(false, "the derivative for 'once_backward' is not implemented");
    }
  };
  torch::nn::ModuleList h;
};
TORCH_MODULE(Once);

TEST(Curvature, NamesAnOperatorWithoutASecondDerivative) {
  Once model;
  Curvature curvature(settings({{"layer_name", "h"}, {"layer_num", 1}}), *model);
  const std::string error = error_of([&] {
    curvature.measure(0, model(torch::ones({2, 8})), [](double value) { return value; });
  });
  EXPECT_NE(error.find("quantize_training.eigenvalue: an operator of the model has no second derivative (the "
                       "derivative for 'once_backward' is not implemented)"),
            std::string::npos)
      << error;
}

}  // namespace
}  // namespace deeptide::compressed
