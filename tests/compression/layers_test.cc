// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rounded values, compressed layers and their schedules are those that DeepSpeed 0.19.6 gave, as Python's are.
#include "compression/models.h"
#include "deeptide/quantize.h"

namespace deeptide::compressed {
namespace {

TEST(Quantize, GivesTheirValuesBitForBit) {
  for (const Json& one : theirs()["quantized"]) {
    const auto type = one["dtype"] == "float32" ? at::kFloat : one["dtype"] == "float16" ? at::kHalf : at::kBFloat16;
    const Tensor got = ops::quantize(grid({4, 6}, 1).to(type), one["bits"], one["groups"], one["kind"] == "symmetric");
    EXPECT_EQ(got.scalar_type(), type);
    EXPECT_EQ(floats_of(got), one["values"].get<std::vector<float>>()) << one;
  }
}

/// The configuration of a recorded layer, from its name.
Json configured(const std::string& name) {
  std::istringstream stream(name);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  Json shared = {{"schedule_offset", 0}};
  if (words[0] == "weight") {
    shared["quantization_type"] = words[2];
    shared["quantize_weight_in_forward"] = true;
    if (words.size() > 3) shared["quantize_groups"] = std::stoi(words[3]);
    return bits(8, std::stoi(words[1]), shared);
  }
  if (words[0] == "activation") {
    shared["quantization_type"] = words[2];
    shared["range_calibration"] = words[3];
    return section("activation_quantization", {{"bits", std::stoi(words[1])}}, shared);
  }
  shared["method"] = words[1];
  if (words[0] == "head") shared["num_heads"] = 3;
  const double ratio = words[0] == "sparse" ? 0.4 : name == "row topk" ? 0.6 : 0.5;
  return section(words[0] + "_pruning", {{"dense_ratio", ratio}}, shared);
}

torch::nn::Sequential made(const std::string& kind) {
  if (kind == "linear") return torch::nn::Sequential(linear());
  if (kind == "conv") return torch::nn::Sequential(conv());
  return torch::nn::Sequential(with_values(torch::nn::Embedding(4, 6), grid({4, 6}, 1)));
}

/// fp32's rounding of sums of products, in the order of torch's matmul.
void expect_near(const Tensor& got, const Json& values) {
  EXPECT_TRUE(at::allclose(got.detach().flatten(), tensor_of(values, {-1}), 1e-5, 1e-5));
}

void expect_layer(const Json& one) {
  SCOPED_TRACE(one["kind"].get<std::string>() + " " + one["name"].get<std::string>());
  torch::nn::Sequential model = made(one["kind"]);
  const auto compression = init_compression(*model, config_of(configured(one["name"])));
  {
    const at::NoGradGuard no_grad;
    for (const auto& [name, values] : one["scores"].items()) {
      Tensor scores = model->named_parameters()["0." + name];
      scores.copy_(tensor_of(values, scores.sizes()));
    }
  }
  Tensor x = tensor_of(one["x"], one["x_shape"].get<std::vector<int64_t>>()), given, y;
  const bool is_words = one["kind"] == "embedding";
  if (is_words) x = x.to(at::kLong);
  for (int number = 0; number < one["passes"]; ++number) {
    model->zero_grad();
    given = (number == one["passes"].get<int>() - 1 ? x : x * (number + 2)).clone();
    if (!is_words) given.requires_grad_();
    compression->before_forward();
    y = model->forward(given);
    (y * y).sum().backward();
  }
  expect_near(y, one["y"]);
  const auto parameters = model->named_parameters();
  EXPECT_EQ(parameters.size(), one["gradients"].size());
  for (const auto& item : parameters) expect_near(item.value().grad(), one["gradients"].at(item.key().substr(2)));
  const auto buffers = model->named_buffers();
  EXPECT_EQ(buffers.size(), one["state"].size());
  for (const auto& item : buffers) {
    EXPECT_EQ(floats_of(item.value()), one["state"].at(item.key().substr(2)).get<std::vector<float>>());
  }
  if (one.contains("x_gradient")) expect_near(given.grad(), one["x_gradient"]);
}

TEST(CompressedLayers, GiveTheirOutputsGradientsAndState) {
  int count = 0;
  for (const Json& one : theirs()["layers"]) {
    if (one.contains("fails")) continue;
    expect_layer(one);
    ++count;
  }
  EXPECT_GE(count, 13);
}

TEST(CompressedLayers, PruneChannelsByTheirNormWhichFailsInDeepSpeed) {
  torch::nn::Sequential model(conv());
  const auto compression =
      init_compression(*model, config_of(section("channel_pruning", {{"dense_ratio", 0.5}}, {{"schedule_offset", 0}})));
  const Tensor norms = grid({4, 3, 2, 2}, 3).abs().sum({1, 2, 3});
  const Tensor kept = norms >= std::get<0>(norms.sort())[2];
  compression->before_forward();
  const auto* layer = model[0]->as<torch::nn::Conv2dImpl>();
  EXPECT_TRUE(layer->weight.equal(grid({4, 3, 2, 2}, 3) * kept.view({-1, 1, 1, 1})));
  EXPECT_TRUE(layer->bias.equal(grid({4}, 2) * kept));
  EXPECT_TRUE(model->named_parameters()["0.weight"].equal(grid({4, 3, 2, 2}, 3))) << "the parameter is what it was";
}

TEST(CompressionSchedule, BeginsTechniquesAtTheirSteps) {
  const std::pair<size_t, Json> techniques[] = {
      {0, bits(8, 4, {{"quantize_weight_in_forward", true}, {"schedule_offset", 2}})},
      {1, section("activation_quantization", {{"bits", 8}}, {{"schedule_offset", 3}})},
      {3, section("row_pruning", {{"dense_ratio", 0.5}}, {{"schedule_offset", 0}})},
      {4, section("head_pruning", {{"dense_ratio", 0.5}},
                  {{"schedule_offset", 4}, {"method", "topk"}, {"num_heads", 2}})}};
  for (const auto& [column, config] : techniques) {
    torch::nn::Sequential model = made("linear");
    const auto compression = init_compression(*model, config_of(config));
    const auto* layer = model[0]->as<CompressedLinearImpl>();
    for (const Json& row : theirs()["flags"]) {
      compression->before_forward();
      const bool changes = !layer->weight.equal(model->named_parameters()["0.weight"]);
      EXPECT_EQ(changes || (layer->input && layer->input->on), row[column].get<bool>()) << column;
      compression->step();
    }
  }
}

Json state_of(const Compression& compression) {
  return read_json<Json>(compression.add_state("{}"))["__deeptide__"]["less_work"]["compression"];
}

TEST(CompressionSchedule, LetsBitsFallAsTheirs) {
  for (const Json& one : theirs()["moq"]) {
    const Json shared = {{"quantization_type", one["kind"]},
                         {"quantize_groups", one["groups"]},
                         {"fp16_mixed_quantize", {{"enabled", one["mixed"]}, {"quantize_change_ratio", 0.25}}}};
    torch::nn::Sequential model = made("linear");
    const auto compression =
        init_compression(*model, config_of(bits(one["start"], one["target"], shared, one["period"])));
    for (const Json& row : one["rows"]) {
      const Json falling = state_of(*compression)["falling"];
      EXPECT_EQ(falling["layers"][0][0], row[0]);
      EXPECT_EQ(falling["layers"][0][1], row[1]);
      EXPECT_EQ(falling["share_kept"], row[2]);
      compression->before_forward();
      if (!row[3].is_null()) {
        EXPECT_EQ(floats_of(model[0]->as<torch::nn::LinearImpl>()->weight), row[3].get<std::vector<float>>());
      }
      compression->step();
    }
  }
}

TEST(CompressionSchedule, GoesOnWhereItsStateWas) {
  const Config config = config_of(bits(8, 3, {{"rounding", "stochastic"}}, 2));
  torch::nn::Sequential one = made("linear"), other = made("linear");
  const auto first = init_compression(*one, config), second = init_compression(*other, config);
  for (int i = 0; i < 5; ++i) first->step();
  EXPECT_TRUE(second->take_state(first->add_state(R"({"epoch": 1})")));
  EXPECT_FALSE(second->take_state("{}"));
  for (int i = 0; i < 4; ++i) {
    first->before_forward();
    second->before_forward();
    const Tensor weight = one[0]->as<torch::nn::LinearImpl>()->weight;
    EXPECT_TRUE(weight.equal(other[0]->as<torch::nn::LinearImpl>()->weight));
    EXPECT_FALSE(weight.equal(grid({4, 6}, 1)));
    first->step();
    second->step();
  }
  EXPECT_EQ(state_of(*first), state_of(*second));
}

}  // namespace
}  // namespace deeptide::compressed
