// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Any mutation of a valid file ends with a Config or with a ConfigError that names the file.
#include <gtest/gtest.h>

#include <random>

#include "deeptide/config.h"
#include "deeptide/errors.h"

namespace deeptide {
namespace {

const char* const kSeed = R"({
  # a file as users have it
  "train_batch_size": 32, "gradient_accumulation_steps": "auto",
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": "auto"}},
  "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 0.1}},
  "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "offload_param": {"device": "none"},
    "leaf_module": {"names": []}, "stage3_max_live_parameters": null},
  "compression_training": {"sparse_pruning": {"different_groups": {"a": {"modules": ["b"]}}}},
  "bf16": {"enabled": true}, "fp16": {"enabled": false, "loss_scale": 0}, "deeptide": {"seed": 7},
})";

const char* const kWords[] = {"{}",          "[]",           "null",      "true",        "false", "-1", "0",
                              "1e400",       "\"auto\"",     "\"x\"",     "0.5",         "\"\"",  "[",  "}",
                              ",",           "\"stage\": 3", "\"type\":", "\"SGD\"",     "// \n", "/*", "\\",
                              "\"enabled\"", "\n",           "9e18",      "{\"a\": [1]}"};

TEST(Fuzz, EndsWithAConfigOrWithAConfigError) {
  const std::string seed = kSeed;
  ASSERT_NO_THROW(Config::from_text(seed));
  std::mt19937 random(7);
  int configs = 0, errors = 0;
  for (int round = 0; round < 4'000; ++round) {
    std::string text = seed;
    for (int change = random() % 3; change >= 0; --change) {
      const size_t at = random() % text.size(), length = random() % 12;
      const std::string word =
          random() % 2 ? kWords[random() % std::size(kWords)] : text.substr(random() % text.size(), 8);
      text.replace(at, std::min(length, text.size() - at), random() % 4 ? word : "");
      if (text.empty()) text = " ";
    }
    try {
      Config::from_text(text, "file.json").batch_sizes(2);
      ++configs;
    } catch (const ConfigError& error) {
      EXPECT_EQ(std::string(error.what()).rfind("file.json:", 0), 0u) << error.what();
      ++errors;
    }
  }
  EXPECT_GT(configs, 20);
  EXPECT_GT(errors, 1000);
}

}  // namespace
}  // namespace deeptide
