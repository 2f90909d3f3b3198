// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cleaned models are those of DeepSpeed 0.19.6; students begin as their teachers; what does not fit is named.
#include "compression/models.h"
#include "errors.h"

namespace deeptide::compressed {
namespace {

const Json kHeads = {{"method", "topk"}, {"num_heads", 3}};
const Json kHalf = {{"dense_ratio", 0.5}};

struct Case {
  std::string name;
  torch::nn::Sequential (*make)();
  Json config;
};

std::vector<Case> cases() {
  return {{"weights", two_linears, bits(8, 4, {{"quantize_weight_in_forward", true}, {"quantize_groups", 2}})},
          {"sparse", two_linears, section("sparse_pruning", {{"dense_ratio", 0.4}})},
          {"rows", two_linears, section("row_pruning", kHalf)},
          {"rows and inputs", two_linears,
           section("row_pruning", kHalf, Json::object(), Json::array({Json::array({"1"})}))},
          {"heads", two_linears, section("head_pruning", kHalf, kHeads)},
          {"heads and outputs", two_linears, section("head_pruning", kHalf, kHeads, Json::array({Json::array({"1"})}))},
          {"channels and features", convolutions,
           section("channel_pruning", kHalf, {{"method", "topk"}}, Json::array({Json::array({"1", "2"})}))}};
}

TEST(RedundancyClean, GivesTheirModels) {
  for (const Case& one : cases()) {
    SCOPED_TRACE(one.name);
    torch::nn::Sequential model = one.make();
    const auto compression = init_compression(*model, config_of(one.config));
    for (const auto& item : model->named_parameters()) {
      const at::NoGradGuard no_grad;
      if (item.key().find("scores") != std::string::npos) item.value().copy_(grid(item.value().sizes(), 16));
    }
    compression->redundancy_clean();
    const Json& expected = theirs()["cleaned"][one.name];
    size_t count = 0;
    for (const auto& list : {model->named_parameters(), model->named_buffers()}) {
      for (const auto& item : list) {
        ++count;
        ASSERT_TRUE(expected.contains(item.key())) << item.key();
        EXPECT_EQ(item.value().sizes().vec(), expected[item.key()][0].get<std::vector<int64_t>>()) << item.key();
        EXPECT_EQ(floats_of(item.value()), expected[item.key()][1].get<std::vector<float>>()) << item.key();
      }
    }
    EXPECT_EQ(count, expected.size());
  }
}

TEST(RedundancyClean, ChangesNoOutput) {
  for (Case& one : cases()) {
    if (one.name == "heads and outputs" || one.name == "channels and features") continue;  // no model by themselves
    SCOPED_TRACE(one.name);
    for (auto& [technique, part] : one.config["compression_training"].items())
      part["shared_parameters"]["schedule_offset"] = 0;
    torch::nn::Sequential model = one.make();
    const auto compression = init_compression(*model, config_of(one.config));
    const Tensor x = grid({5, 6}, 18);
    compression->before_forward();
    const Tensor expected = model->forward(x);
    compression->redundancy_clean();
    EXPECT_TRUE(at::allclose(model->forward(x), expected, 1e-5, 1e-6));
  }
}

TEST(RedundancyClean, LetsInputsStayQuantised) {
  torch::nn::Sequential model = two_linears();
  const auto compression =
      init_compression(*model, config_of(section("activation_quantization", {{"bits", 8}},
                                                 {{"schedule_offset", 0}, {"range_calibration", "static"}})));
  const Tensor x = grid({3, 6}, 5);
  const Tensor rounded = model->forward(x);
  model->eval();
  compression->redundancy_clean();
  EXPECT_TRUE(model->forward(x).equal(rounded));
  EXPECT_FALSE(two_linears()->forward(x).equal(rounded));
}

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int count, int64_t width = 3) {
    torch::nn::ModuleList layers;
    for (int i = 0; i < count; ++i) layers->push_back(torch::nn::Linear(width, width));
    register_module("h", layers);
    register_module("head", torch::nn::Linear(width, 2));
  }
};
TORCH_MODULE(Stack);

Json reduction(const Json& changes = Json::object()) {
  Json part = {{"enabled", true},
               {"keep_number_layer", 2},
               {"module_name_prefix", "h"},
               {"teacher_layer", {1, 3}},
               {"other_module_name", {"head"}}};
  part.update(changes);
  return {{"compression_training", {{"layer_reduction", part}}}};
}

TEST(LayerReduction, BeginsAStudentAsItsTeachersLayers) {
  Stack teacher(5), student(2);
  init_compression(*student, config_of(reduction()), teacher.get());
  const auto mine = student->named_parameters(), their = teacher->named_parameters();
  for (const auto& [name, source] : {std::pair{"h.0", "h.1"}, {"h.1", "h.3"}, {"head", "head"}}) {
    for (const char* key : {".weight", ".bias"}) {
      EXPECT_TRUE(mine[std::string(name) + key].equal(their[std::string(source) + key])) << name;
    }
  }
}

void expect_refusal(const std::function<void()>& call, const std::string& text) {
  const std::string found = error_of(call);
  EXPECT_NE(found.find(text), std::string::npos) << found;
}

TEST(LayerReduction, NamesWhatDoesNotFit) {
  const auto refuses = [](const Json& changes, const char* text, int64_t width = 3) {
    Stack teacher(5, width), student(2);
    expect_refusal([&] { init_compression(*student, config_of(reduction(changes)), teacher.get()); }, text);
  };
  refuses({{"teacher_layer", {1}}}, "keep_number_layer: got 2, and teacher_layer names 1");
  refuses({{"module_name_prefix", "layers"}}, "the student has no module layers.0");
  refuses({{"teacher_layer", {1, 9}}}, "the teacher has no module h.9");
  refuses(Json::object(), "h.0.weight has the shape [3, 3], the teacher's [4, 4]", 4);
  Stack student(2);
  expect_refusal([&] { init_compression(*student, config_of(reduction())); }, "enabled: true needs a teacher");
}

TEST(InitCompression, NamesWhatDoesNotFit) {
  const auto refuses = [](const Json& config, const char* text) {
    torch::nn::Sequential model = two_linears();
    expect_refusal([&] { init_compression(*model, config_of(config)); }, text);
  };
  refuses(bits(4, 8), "weight_quantization.different_groups.a.params.target_bits: 8 exceeds start_bits, 4");
  refuses(bits(8, 2, {{"quantization_type", "asymmetric"}}), "quantization_type: \"asymmetric\" has no 2 bits");
  refuses(bits(8, 1, {{"rounding", "stochastic"}}), "rounding: \"stochastic\" has no 1 bits");
  refuses(bits(8, 4, {{"quantize_groups", 5}}), "quantize_groups: 5 does not divide the 24 elements of 0");
  refuses(section("activation_quantization", {{"bits", 6}}), "params.bits: got 6, expected 4 or 8");
  refuses(section("row_pruning", Json::object()), "row_pruning.different_groups.a.params.dense_ratio: is missing");
  refuses(section("head_pruning", kHalf, {{"num_heads", 2}}), "head_pruning.shared_parameters.method: got \"l1\"");
  refuses(section("head_pruning", kHalf, {{"method", "topk"}, {"num_heads", 4}}),
          "0 has 6 inputs, which num_heads, 4, does not divide");
  refuses(section("sparse_pruning", kHalf, Json::object(), Json::array({Json::array({"1"})})),
          "sparse_pruning changes no shapes");
  refuses(section("row_pruning", kHalf, Json::object(), nullptr, {"("}), "modules: '(' is no regular expression");
  refuses(section("row_pruning", kHalf, Json::object(), nullptr, {"x"}),
          "no module that row_pruning can change has 'x'");
  refuses(section("activation_quantization", {{"bits", 8}}, Json::object(), nullptr, {"1"}),
          "activation_quantization takes deeptide's CompressedLinear");
  refuses(section("row_pruning", kHalf, Json::object(), nullptr, {"0", "0$"}),
          "'0$' names 0, which a: '0' names already");
  refuses({{"quantize_training",
            {{"enabled", true}, {"eigenvalue", {{"enabled", true}, {"layer_name", "h"}, {"layer_num", 1}}}}}},
          "the model has no list of 1 layers at 'h'");
}

TEST(InitCompression, IsCalledOnce) {
  torch::nn::Sequential model = two_linears();
  const Config config = config_of(section("row_pruning", kHalf));
  const auto compression = init_compression(*model, config);
  expect_refusal([&] { init_compression(*model, config); }, "0 has row_pruning already");
  compression->redundancy_clean();
  expect_refusal([&] { compression->redundancy_clean(); }, "0 has no row_pruning; it was made final already");
}

}  // namespace
}  // namespace deeptide::compressed
