// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The published schema accepts what Config accepts, and the committed pages are the table's.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "config/publish/schema_check.h"
#include "config/table_cases.h"
#include "deeptide/config.h"

namespace deeptide::config {
namespace {

std::string read(const std::string& name) {
  std::ifstream file(std::string(DEEPTIDE_DOCS) + "/" + name);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Both say yes or both say no. A key given twice cannot be seen by a schema, nor can two keys be compared.
void expect_agreement(const nlohmann::json& schema, const std::string& text) {
  const std::string error = error_of(text);
  EXPECT_EQ(satisfies(schema, nlohmann::json::parse(text)), error.empty()) << text << "\n" << error;
}

TEST(Publish, CommittedFilesAreWhatTheTableGives) {
  EXPECT_EQ(read("config.md"), config_markdown()) << "build the target config_docs and commit docs/config.md";
  EXPECT_EQ(read("ds_config.schema.json"), config_json_schema())
      << "build the target config_docs and commit the schema";
}

TEST(Publish, PageNamesEveryKeyAndSection) {
  const std::string page = config_markdown();
  for (const TableCase& c : all_leaves()) {
    EXPECT_NE(page.find("| `" + c.key->name + "` |"), std::string::npos) << c.path();
  }
  for (const TableCase& c : all_sections()) {
    EXPECT_NE(page.find(c.key->name + "`\n\n" + c.key->doc), std::string::npos) << c.path();
  }
}

TEST(Publish, PageBeginsWithConfigurationsThatCanBeCopied) {
  const std::string page = config_markdown();
  const std::string fence = "```json\n";
  size_t copied = 0, end = 0;
  for (size_t at = page.find(fence); at != std::string::npos; at = page.find(fence, end), ++copied) {
    end = page.find("```", at + fence.size());
    const auto config = Config::from_text(page.substr(at + fence.size(), end - at - fence.size()));
    EXPECT_EQ(config.batch_sizes(2).accumulation, 8);
    for (const std::string& decision : config.decisions()) EXPECT_EQ(decision.find("no effect"), std::string::npos);
  }
  EXPECT_EQ(copied, 3u);
}

TEST(Publish, SchemaAgreesWithConfigOnEveryKey) {
  const auto schema = nlohmann::json::parse(config_json_schema());
  for (const TableCase& c : all_leaves()) {
    std::vector<std::string> values = wrong_values(*c.key);
    values.insert(values.end(), {to_text(c.key->fallback), "\"auto\"", "null"});
    if (const std::string other = other_value(*c.key); !other.empty()) values.push_back(other);
    for (const std::string& name : c.key->choices) values.push_back("\"" + name + "\"");
    for (const std::string& value : values) {
      // Integers beyond 64 bits are beyond a schema too.
      if (value == "1e300" || value == "9223372036854775808" || depends_on_another(*c.key)) continue;
      expect_agreement(schema, c.text(value, false));
      expect_agreement(schema, c.text(value, true));
    }
    expect_agreement(schema, c.text(c.key->name + "x", "1", false));
  }
}

TEST(Publish, SchemaAgreesWithConfigOnEverySection) {
  const auto schema = nlohmann::json::parse(config_json_schema());
  for (const TableCase& c : all_sections()) {
    for (const char* value : {"{}", "null", "\"auto\"", "1", "true", "{\"qqq\": 1}", "{\"enabled\": true}"}) {
      const bool params = !c.key->variants.empty();
      if (!params) expect_agreement(schema, c.text(value));
    }
  }
}

TEST(Publish, SchemaAgreesWithConfigOnShares) {
  const auto schema = nlohmann::json::parse(config_json_schema());
  const auto placed = [](const std::string& share) {
    return R"({"deeptide": {"placement": {"gradients": {"cpu": ")" + share + R"(", "device": "rest"}}}})";
  };
  for (const char* share :
       {"40%", "8GiB", "8 GiB", "1.5 TB", "0B", "12KB", "0.5%", "100%", "100.0 %", "7. MiB", "007%"}) {
    EXPECT_EQ(error_of(placed(share)), "") << share;
    expect_agreement(schema, placed(share));
  }
  for (const char* share : {"", "40", "half", "Rest", "140%", "100.1%", "-4%", "8 parrots", "8gib", "8Gi", "0x10GiB",
                            "1e3B", "1.2.3B", ".5%", "8GiB ", "rest "}) {
    EXPECT_NE(error_of(placed(share)), "") << share;
    expect_agreement(schema, placed(share));
  }
  expect_agreement(schema, R"({"deeptide": {"placement": {"gradients": {"cpu": "rest"}}}})");
}

TEST(Publish, SchemaAgreesWithConfigOnWholeFiles) {
  const auto schema = nlohmann::json::parse(config_json_schema());
  for (const char* text : {
           R"({"zero_optimization": true, "optimizer": {"type": "ADAMW", "params": {"lr": 1}}})",
           R"({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}})",
           R"({"optimizer": {"type": "Lamb"}})",
           R"({"optimizer": {"type": "Muon", "params": {"muon_lr": 0.1, "ns_method": "gram"}}})",
           R"({"optimizer": {"type": "MuAdam"}})",
           R"({"scheduler": {"type": "WarmupDecayLR"}})",
           R"({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}})",
           R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1, "cycle_max_lr": [1]}}})",
           R"({"zero": {"stage": 1}, "zero_optimization": {"stage": 1}})",
           R"({"zero": {"offload_optimizer": {"device": "none", "pin_memory": false}}})",
           R"({"zero": {"offload_optimizer": {"device": "cpu"}}})",
           R"({"fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 3}})",
           R"({"bf16": {"enabled": true, "check_grad_overflow": false}})",
           R"({"bf16": {"enabled": false, "check_grad_overflow": false}})",
           R"({"amp": {"enabled": false, "anything": 1}})",
           R"({"zero": {"offload_param": {"device": "none", "buffer_size": "large", "_why": 1}}})",
           R"({"zero": {"offload_param": {"device": "gpu"}}})",
           R"({"zero": {"offload_param": {"device": null, "buffer_siz": 1}}})",
           R"({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": false},
               "different_groups": {"one": {"params": {"quantization_period": 0}}, "two": 2}}}})",
           R"({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true},
               "different_groups": {"one": {"params": {"quantization_period": 0}}}}}})",
           R"({"prescale_gradients": true, "_comment": "x", "//": [], "aio": {"queue_depth": 32}})",
       }) {
    expect_agreement(schema, text);
  }
}

}  // namespace
}  // namespace deeptide::config
