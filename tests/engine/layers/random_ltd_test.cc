// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A layer sees the tokens that were drawn, their mask and positions, and the others pass; also in a recomputation.
#include "deeptide/random_ltd.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "deeptide/recompute.h"
#include "errors.h"

namespace deeptide::random_ltd {
namespace {

using at::Tensor;

constexpr int64_t kBatch = 3, kLength = 7, kKept = 4;

Config section(const std::string& changes = "{}") {
  return Config::from_text(R"({"train_micro_batch_size_per_gpu": 1, "data_efficiency": {"enabled": true,
      "data_routing": {"enabled": true, "random_ltd": {"enabled": true, "total_layer_num": 3, "random_ltd_layer_num": 1,
      "random_ltd_layer_id": [1], "model_type": "decoder", "hidden_state_order": "batch_seq_dim", "random_ltd_schedule":
      {"min_value": 4, "max_value": 7, "schedule_type": "fixed_linear", "schedule_config": {"require_steps": 6,
      "seq_per_step": 1}}}}}})")
      .with(changes);
}

std::string routing(const std::string& part) {
  return R"({"data_efficiency": {"data_routing": {"random_ltd": )" + part + "}}}";
}

TEST(RandomLtd, RunsALayerOnTheTokensThatWereDrawn) {
  for (const bool first : {true, false}) {
    const Config config = section(first ? "{}" : routing(R"({"hidden_state_order": "seq_batch_dim"})"));
    const RandomLtd ltd = RandomLtd::from_config(config, 2);
    const Tensor whole = at::randn({kBatch, kLength, 5}).requires_grad_();
    Tensor seen;
    const auto twice = [&](const RandomLtd::Tokens& tokens) {
      seen = tokens.indices;
      return tokens.hidden * 2;
    };
    Tensor output = ltd.run(1, twice, first ? whole : whole.transpose(0, 1), true);
    if (!first) output = output.transpose(0, 1);
    ASSERT_EQ(seen.sizes(), at::IntArrayRef({kBatch, kKept}));
    EXPECT_TRUE(seen.diff().gt(0).all().item<bool>()) << "ascending";
    const Tensor factor = at::ones({kBatch, kLength}).scatter(1, seen, 2.0).unsqueeze(-1).expand_as(whole);
    EXPECT_TRUE(output.equal(whole * factor));
    output.sum().backward();
    EXPECT_TRUE(whole.grad().equal(factor));
  }
}

TEST(RandomLtd, LeavesOtherLayersAndEvaluationAlone) {
  RandomLtd ltd = RandomLtd::from_config(section(), 2);
  const Tensor whole = at::randn({kBatch, kLength, 5}), mask = at::zeros({1, 1, kLength, kLength});
  int64_t length = 0;
  const auto layer = [&](const RandomLtd::Tokens& tokens) {
    length = tokens.hidden.size(1);
    EXPECT_EQ(tokens.mask.size(-1), length);
    return tokens.hidden;
  };
  const auto length_in = [&](int64_t number, bool is_training) {
    ltd.run(number, layer, whole, is_training, mask);
    return length;
  };
  EXPECT_EQ(length_in(1, true), kKept);
  EXPECT_EQ(length_in(0, true), kLength);
  EXPECT_EQ(length_in(1, false), kLength);
  ltd.schedule().update(6);
  EXPECT_EQ(length_in(1, true), kLength);
}

TEST(RandomLtd, GivesALayerTheMaskOfItsTokens) {
  const Tensor index = at::tensor({0, 2, 3, 1, 2, 4}).view({2, 3}), causal = at::rand({1, 1, 5, 5});
  EXPECT_TRUE(ops::mask_of_kept(causal, index, 5, false).equal(causal.slice(2, 0, 3).slice(3, 0, 3)));
  EXPECT_TRUE(ops::mask_of_kept(causal[0][0], index, 5, false).equal(causal[0][0].slice(0, 0, 3).slice(1, 0, 3)));
  const Tensor chosen = ops::mask_of_kept(causal, index, 5, true);
  const Tensor padding = at::rand({2, 5}), kept = ops::mask_of_kept(padding, index, 5, false);
  for (int64_t row = 0; row < 2; ++row) {
    EXPECT_TRUE(chosen[row][0].equal(causal[0][0].index_select(0, index[row]).index_select(1, index[row])));
    EXPECT_TRUE(kept[row].equal(padding[row].index_select(0, index[row])));
  }
  EXPECT_NE(error_of([&] {
              ops::mask_of_kept(at::rand({4, 1, 5, 5}), index, 5, true);
            }).find("expected 2 rows or one"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              ops::mask_of_kept(at::rand({2, 6}), index, 5, true);
            }).find("the last of 5 tokens"),
            std::string::npos);
}

TEST(RandomLtd, FindsItsTokensAgainInARecomputation) {
  const RandomLtd ltd = RandomLtd::from_config(section(), 2);
  const auto gradient = [&](bool again) {
    torch::manual_seed(4);
    const Tensor whole = at::ones({kBatch, kLength, 1}).requires_grad_();
    const auto block = [&](const std::vector<Tensor>& inputs) {
      return std::vector{ltd.run(
          1, [](const RandomLtd::Tokens& tokens) { return tokens.hidden * 3; }, inputs[0], true)};
    };
    (again ? recompute(block, {whole}) : block({whole})).at(0).sum().backward();
    return whole.grad();
  };
  const Tensor kept = gradient(false);
  EXPECT_EQ(kept.eq(3).sum().item<int64_t>(), kBatch * kKept);
  EXPECT_TRUE(gradient(true).equal(kept));
}

TEST(RandomLtd, NamesWhatItRefuses) {
  const auto error =
      error_of([] { RandomLtd::from_config(section(routing(R"({"random_ltd_layer_id": [0, 1]})")), 2); });
  EXPECT_NE(error.find("random_ltd_layer_id: names 2 layers, expected random_ltd_layer_num, 1"), std::string::npos)
      << error;
}

}  // namespace
}  // namespace deeptide::random_ltd
