// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// From a text to fields: what is honoured, what keys mean together, and what errors say.
#include "deeptide/config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "config/base64.h"
#include "config/check/suggest.h"
#include "config/table_cases.h"
#include "deeptide/errors.h"

namespace deeptide {
namespace {

using config::error_of;

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

bool decided(const Config& config, const std::string& part) {
  return std::any_of(config.decisions().begin(), config.decisions().end(),
                     [&](const auto& line) { return has(line, part); });
}

TEST(Config, SaysWhichDefaultsAUserMightNotExpect) {
  EXPECT_TRUE(decided(Config(), "gradient_clipping: not given, so 1"));
  EXPECT_FALSE(decided(Config::from_text(R"({"gradient_clipping": 1})"), "gradient_clipping"));
}

// Writes what the generated tests in binding_test.cc do not: other names, other spellings, comments.
TEST(Config, ReadsNumbersWordsAndNamesInAllTheirSpellings) {
  const Config c = Config::from_text(R"({
    // all of it
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2,
    "gradient_allreduce_op": "SUM", "bfloat16": {"enabled": true}, "vocabulary_size": 50257,
    "zero": {"stage": 2, "reduce_bucket_size": 2e8, "prefetch_bucket_size": 1, "max_reuse_distance": 1e9,
             "stage3_gather_fp16_weights_on_model_save": true },
  })");
  EXPECT_EQ(c.batch_sizes(2).train, 32);
  EXPECT_EQ(c.gradients().op, GradientOp::sum);
  EXPECT_TRUE(c.precision().bf16);
  EXPECT_EQ(c.compute_dtype(), DataType::bf16);
  EXPECT_EQ(c.zero().stage, 2);
  EXPECT_EQ(c.zero().reduce_bucket_size, 200'000'000);
  EXPECT_EQ(c.zero().prefetch_bucket_size, 1);
  EXPECT_EQ(c.zero().max_reuse_distance, 1'000'000'000);
  EXPECT_TRUE(c.zero().gather_16bit_weights_on_model_save);
  EXPECT_TRUE(decided(c, "vocabulary_size: 50257 is not a multiple of 8"));
}

// The generated tests cannot know which enumerator a spelling means.
TEST(Config, ReadsEachWordAsItsEnumerator) {
  const auto runtime = [](const std::string& key, const std::string& word) {
    return Config::from_text("{\"deeptide\": {\"" + key + "\": \"" + word + "\"}}").runtime();
  };
  EXPECT_EQ(runtime("reduction", "ordered").reduction, Reduction::ordered);
  EXPECT_EQ(runtime("reduction", "transport").reduction, Reduction::transport);
  EXPECT_EQ(runtime("reduce_thread", "auto").reduce_thread, ReduceThread::automatic);
  EXPECT_EQ(runtime("reduce_thread", "on").reduce_thread, ReduceThread::on);
  EXPECT_EQ(runtime("reduce_thread", "off").reduce_thread, ReduceThread::off);
  EXPECT_EQ(Config::from_text(R"({"gradient_allreduce_op": "mean"})").gradients().op, GradientOp::mean);
  const Config types =
      Config::from_text(R"({"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp32"}})");
  EXPECT_EQ(types.precision().communication_dtype, DataType::bf16);
  EXPECT_EQ(types.precision().gradient_accumulation_dtype, DataType::fp32);
  for (const auto& [word, shape] : {std::pair("log", WarmupShape::log), std::pair("linear", WarmupShape::linear)}) {
    const Config c = Config::from_text("{\"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_type\": \"" +
                                       std::string(word) + "\"}}}");
    EXPECT_EQ(std::get<WarmupLRConfig>(c.scheduler()).shape, shape);
  }
}

TEST(Config, ReadsAdamInAllItsSpellings) {
  const Config c = Config::from_text(R"({"optimizer": {"type": "adamw", "params": {
    "lr": 1e-4, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "bias_correction": false}}})");
  ASSERT_NE(c.optimizer().defaults.optimizer(), nullptr);
  EXPECT_EQ(c.optimizer().defaults.optimizer()->name, "Adam");
  EXPECT_EQ(c.optimizer().type, "adamw");
  EXPECT_EQ(c.optimizer().defaults.get("lr"), 1e-4);
  EXPECT_EQ(c.optimizer().defaults.get("beta1"), 0.8);
  EXPECT_EQ(c.optimizer().defaults.get("beta2"), 0.95);
  EXPECT_EQ(c.optimizer().defaults.get("eps"), 1e-6);
  EXPECT_EQ(c.optimizer().defaults.get("weight_decay"), 0.1);
  EXPECT_TRUE(c.optimizer().defaults.get("decoupled_weight_decay"));
  EXPECT_FALSE(c.optimizer().defaults.get("bias_correction"));
  const Config adam = Config::from_text(R"({"optimizer": {"type": "Adam"}})");
  EXPECT_TRUE(adam.optimizer().defaults.get("decoupled_weight_decay"));
  EXPECT_EQ(adam.optimizer().defaults.get("lr"), 1e-3);
  EXPECT_TRUE(decided(adam, "\"Adam\" decouples weight decay"));
  const Config l2 = Config::from_text(R"({"optimizer": {"type": "ADAM", "params": {"adam_w_mode": false}}})");
  EXPECT_FALSE(l2.optimizer().defaults.get("decoupled_weight_decay"));
  const Config w = Config::from_text(R"({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false}}})");
  EXPECT_TRUE(w.optimizer().defaults.get("decoupled_weight_decay"));
  EXPECT_TRUE(decided(w, "\"AdamW\" decouples weight decay, also with adam_w_mode: false"));
}

TEST(Config, GivesMuonsOtherParametersL2DecayIfAsked) {
  const auto decouples = [](const char* params) {
    const Config c = Config::from_text(std::string(R"({"optimizer": {"type": "Muon", "params": )") + params + "}}");
    return c.optimizer().rest.get("decoupled_weight_decay") != 0.0;
  };
  EXPECT_TRUE(decouples("{}"));
  EXPECT_FALSE(decouples(R"({"adam_w_mode": false})"));
}

TEST(Config, SaysWhereClippingIsNotDeepSpeeds) {
  const auto says = [](const char* text, const char* part) { return decided(Config::from_text(text), part); };
  const char* const kMuon = "clip Muon's updates";
  EXPECT_TRUE(says(R"({"optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 2}})", kMuon));
  EXPECT_FALSE(says(R"({"optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 3}})", kMuon));
  const char* const kHalf = "clip them before they are unscaled";
  EXPECT_TRUE(
      says(R"({"torch_autocast": {"enabled": true, "dtype": "float16"}, "zero_optimization": {"stage": 3}})", kHalf));
  EXPECT_FALSE(says(R"({"torch_autocast": {"enabled": true, "dtype": "float16"}})", kHalf)) << "as its stage 0";
  EXPECT_FALSE(says(R"({"torch_autocast": {"enabled": true, "dtype": "float16"}, "zero_optimization": {"stage": 1},
                        "gradient_clipping": 0})",
                    kHalf));
  EXPECT_FALSE(
      says(R"({"torch_autocast": {"enabled": true, "dtype": "bfloat16"}, "zero_optimization": {"stage": 1}})", kHalf));
}

TEST(Config, ReadsLionAndAdagradInAnyCase) {
  const Config lion = Config::from_text(R"({"optimizer": {"type": "lion", "params": {"betas": [0.95, 0.98]}}})");
  ASSERT_NE(lion.optimizer().defaults.optimizer(), nullptr);
  EXPECT_EQ(lion.optimizer().defaults.optimizer()->name, "Lion");
  EXPECT_EQ(lion.optimizer().defaults.lr(), 1e-3);
  EXPECT_EQ(lion.optimizer().defaults.get("beta1"), 0.95);
  EXPECT_EQ(lion.optimizer().defaults.get("beta2"), 0.98);
  const Config adagrad = Config::from_text(R"({"optimizer": {"type": "ADAGRAD", "params": {"weight_decay": 0.5}}})");
  EXPECT_EQ(adagrad.optimizer().defaults.lr(), 1e-2);
  EXPECT_EQ(adagrad.optimizer().defaults.get("eps"), 1e-10);
  EXPECT_EQ(adagrad.optimizer().defaults.get("weight_decay"), 0.5);
}

TEST(Hyperparameters, AreTheTablesDefaultsByName) {
  Hyperparameters adam("adamw");
  EXPECT_EQ(adam, Hyperparameters("Adam"));
  EXPECT_EQ(adam.get("beta2"), 0.999);
  EXPECT_EQ(adam.get("decoupled_weight_decay"), 1.0);
  EXPECT_EQ(adam.set("beta2", 0.5).get("beta2"), 0.5);
  EXPECT_NE(adam, Hyperparameters("Adam"));
  EXPECT_FALSE(Hyperparameters().has("lr"));
  const auto error_of_name = [](const Hyperparameters& hyper, const char* name) -> std::string {
    try {
      hyper.get(name);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(error_of_name(Hyperparameters("Lion"), "eps"),
            "Lion: no hyper-parameter 'eps', expected one of lr, beta1, beta2, weight_decay");
  EXPECT_EQ(error_of_name(Hyperparameters(), "lr"), "this group has no optimizer, so no hyper-parameter 'lr'");
  EXPECT_THROW(Hyperparameters("MuAdam"), ConfigError);
}

TEST(Config, ReadsRmspropAndLamb) {
  const Config rmsprop = Config::from_text(
      R"({"optimizer": {"type": "rmsprop", "params": {"alpha": 0.9, "centered": true, "momentum": 0.5}}})");
  ASSERT_NE(rmsprop.optimizer().defaults.optimizer(), nullptr);
  EXPECT_EQ(rmsprop.optimizer().defaults.optimizer()->name, "RMSprop");
  EXPECT_EQ(rmsprop.optimizer().defaults.lr(), 1e-2);
  EXPECT_EQ(rmsprop.optimizer().defaults.get("alpha"), 0.9);
  EXPECT_EQ(rmsprop.optimizer().defaults.get("centered"), 1.0);
  const Config lamb = Config::from_text(
      R"({"optimizer": {"type": "LAMB", "params": {"lr": 0.5, "max_coeff": 0.3, "min_coeff": 0.1, "max_grad_norm": 0.0}}})");
  EXPECT_EQ(lamb.optimizer().defaults.optimizer()->name, "Lamb");
  EXPECT_EQ(lamb.optimizer().defaults.get("max_coeff"), 0.3);
  EXPECT_EQ(lamb.optimizer().defaults.get("eps_inside_sqrt"), 0.0);
  EXPECT_EQ(lamb.optimizer().rest.optimizer(), nullptr);
}

/// Matrices and the rest have numbers of their own, with DeepSpeed's defaults.
TEST(Config, ReadsMuonForMatricesAndForTheRest) {
  const auto read = [](const std::string& params) {
    return Config::from_text(R"({"optimizer": {"type": "Muon", "params": {)" + params + "}}}").optimizer();
  };
  const OptimizerConfig plain = read("");
  EXPECT_EQ(plain.defaults.optimizer()->name, "Muon");
  EXPECT_EQ(plain.defaults.get("use_muon"), 1.0);
  EXPECT_EQ(plain.rest.get("use_muon"), 0.0);
  EXPECT_EQ(plain.defaults.lr(), 0.02);
  EXPECT_EQ(plain.rest.lr(), 3e-4);
  EXPECT_EQ(plain.defaults.get("eps"), 1e-7);
  EXPECT_EQ(plain.rest.get("eps"), 1e-10);
  EXPECT_EQ(plain.rest.get("beta2"), 0.95);
  EXPECT_EQ(plain.defaults.get("ns_coefficient2"), -4.7750);
  const OptimizerConfig one = read(R"("lr": 0.5, "eps": 1e-6, "ns_method": "standard")");
  EXPECT_EQ(one.defaults.lr(), 0.5);
  EXPECT_EQ(one.rest.lr(), 0.5);
  EXPECT_EQ(one.defaults.get("eps"), 1e-7);
  EXPECT_EQ(one.rest.get("eps"), 1e-6);
  const OptimizerConfig two = read(R"("lr": 0.5, "muon_lr": 0.25, "adam_lr": 0.125)");
  EXPECT_EQ(two.defaults.lr(), 0.25);
  EXPECT_EQ(two.rest.lr(), 0.125);
  EXPECT_FALSE(two.defaults.has("muon_lr")) << "param groups have a rate each";
}

TEST(Config, ReadsTheTypesOfMastersMomentsAndSums) {
  const Config plain = Config::from_text(R"({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "bf16"}})");
  EXPECT_EQ(plain.precision().gradient_accumulation_dtype, DataType::bf16);
  EXPECT_FALSE(plain.precision().rounds_masters());
  const Config rounded = Config::from_text(
      R"({"bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}})");
  EXPECT_TRUE(rounded.precision().rounds_masters());
  EXPECT_TRUE(rounded.precision().rounds_moments());
  const Config off = Config::from_text(R"({"fp16": {"enabled": false, "fp16_master_weights_and_grads": true}})");
  EXPECT_FALSE(off.precision().rounds_masters()) << "the section is off";
}

TEST(Config, ReadsSgd) {
  const Config c = Config::from_text(R"({"optimizer": {"type": "SGD", "params": {
    "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": true}}})");
  ASSERT_NE(c.optimizer().defaults.optimizer(), nullptr);
  EXPECT_EQ(c.optimizer().defaults.optimizer()->name, "SGD");
  EXPECT_EQ(c.optimizer().defaults.get("momentum"), 0.9);
  EXPECT_TRUE(c.optimizer().defaults.get("nesterov"));
  EXPECT_FALSE(c.optimizer().defaults.has("beta1"));
  EXPECT_EQ(Config::from_text(R"({"optimizer": {"type": "sgd", "params": {"dampening": 0.5}}})")
                .optimizer()
                .defaults.get("dampening"),
            0.5);
}

TEST(Config, DerivesTheSecondHalfOfACycleFromTheFirst) {
  const auto cycle = [](const std::string& more) {
    const Config c = Config::from_text(R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1,
        "cycle_max_lr": 1, "cycle_first_step_size": 7, "cycle_first_stair_count": 3)" +
                                       more + "}}}");
    return std::get<OneCycleConfig>(c.scheduler());
  };
  EXPECT_EQ(cycle("").second_step_size, 7);
  EXPECT_EQ(cycle(R"(, "cycle_second_stair_count": "auto")").second_stair_count, 3);
  EXPECT_EQ(cycle(R"(, "cycle_second_step_size": 0, "cycle_second_stair_count": 5)").second_step_size, 0);
}

TEST(Config, DerivesTheWarmedUpRateFromTheOptimizerForAuto) {
  const auto read = [](const std::string& rate, const std::string& optimizer) {
    return Config::from_text(optimizer + R"("scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10,
        "warmup_num_steps": 20)" +
                             rate + "}}}");
  };
  const auto max_lr = [](const Config& c) { return std::get<WarmupDecayLRConfig>(c.scheduler()).max_lr; };
  const std::string adam = R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.25}}, )";
  const Config c = read(R"(, "warmup_max_lr": "auto")", adam);
  EXPECT_EQ(max_lr(c), 0.25);
  EXPECT_TRUE(decided(c, "scheduler.params.warmup_max_lr: \"auto\" became 0.25 (optimizer.params.lr)"));
  EXPECT_TRUE(decided(c, "the warm-up will not end"));
  EXPECT_EQ(max_lr(read("", adam)), 0.001);
  const Config alone = read(R"(, "warmup_max_lr": "auto")", "{");
  EXPECT_EQ(max_lr(alone), 0.001);
  EXPECT_TRUE(decided(alone, "warmup_max_lr: \"auto\" became 0.001"));
}

TEST(Config, CanBeReadWithoutItsSchedule) {
  const Config c = Config::from_text(R"({"scheduler": {"type": "WarmupLR"}})");
  EXPECT_EQ(scheduler_type(c.scheduler()), "WarmupLR");
  const Config without = c.without_scheduler();
  EXPECT_EQ(scheduler_type(without.scheduler()), "");
  EXPECT_EQ(without.text(), c.text());
  EXPECT_TRUE(decided(without, "the caller's lr_scheduler replaces"));
}

TEST(Config, MergesAPatchAndValidatesTheWhole) {
  const Config c = Config::from_text(
      R"({"zero_optimization": {"stage": 3, "overlap_comm": false}, "bf16": {"enabled": true}})", "a.json");
  const Config patched = c.with(R"({"zero_optimization": {"stage": 1}, "bf16": null, "deeptide": {"seed": 5}})");
  EXPECT_EQ(patched.zero().stage, 1);
  EXPECT_FALSE(patched.zero().overlap_comm);
  EXPECT_FALSE(patched.precision().bf16);
  EXPECT_EQ(patched.runtime().seed, 5u);
  EXPECT_EQ(c.zero().stage, 3);
  try {
    c.with(R"({"gradient_allreduce_op": "sum"})");
    ADD_FAILURE() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_TRUE(has(error.what(), "a.json (patched):1: gradient_allreduce_op: \"sum\" is not supported"))
        << error.what();
  }
  EXPECT_THROW(c.with("[1]"), ConfigError);
}

TEST(Config, TakesABooleanForTheZeroSection) {
  EXPECT_EQ(Config::from_text(R"({"zero_optimization": true})").zero().stage, 1);
  EXPECT_EQ(Config::from_text(R"({"zero": false})").zero().stage, 0);
  EXPECT_EQ(Config::from_text(R"({"zero": {"stage": 3}})").zero().stage, 3);
}

TEST(Config, ReadsBase64AsDeepSpeedsToolsPassIt) {
  EXPECT_EQ(Config::from_text("eyJ6ZXJvIjogeyJzdGFnZSI6IDJ9fQ==").zero().stage, 2);
  EXPECT_EQ(Config::from_text(" eyJ6ZXJvIjogeyJzdGFnZSI6IDJ9fQ\n").text(), R"({"zero": {"stage": 2}})");
  EXPECT_EQ(config::decode_base64_url("-_-_"), std::string("\xfb\xff\xbf"));
  EXPECT_FALSE(config::decode_base64_url("ab+/").has_value());
  EXPECT_TRUE(has(error_of("true"), "expected an object of keys in braces, got true"));
}

TEST(Config, SaysWhichKeysContradictEachOther) {
  EXPECT_TRUE(has(error_of(R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})"),
                  "bfloat16 and fp16 modes cannot be simultaneously enabled"));
  EXPECT_TRUE(has(error_of("{\"zero\": {\"stage\": 3},\n\"gradient_allreduce_op\": \"sum\"}"),
                  "ds_config.json:2: gradient_allreduce_op: \"sum\" is not supported with ZeRO stage 3"));
  EXPECT_TRUE(has(error_of(R"({"optimizer": {"type": "SGD", "params": {"nesterov": true}}})"),
                  "Nesterov momentum requires a momentum above 0 and zero dampening"));
  EXPECT_TRUE(has(error_of(R"({"optimizer": {"type": "Lamb", "params": {"min_coeff": 2, "max_coeff": 1}}})"),
                  "optimizer.params.min_coeff: the lower bound of the trust ratio is above max_coeff"));
}

TEST(Config, NamesTheCureForWhatBelongsElsewhere) {
  EXPECT_TRUE(has(error_of(R"({"stage": 3})"), "stage: unknown key; it belongs under 'zero_optimization'"));
  EXPECT_TRUE(has(error_of(R"({"zero": {"gradient_clipping": 1}})"), "it belongs under 'the top level'"));
  EXPECT_TRUE(has(error_of(R"({"lr": 1})"), "it belongs under 'optimizer.params'"));
  EXPECT_TRUE(has(error_of(R"({"optimizer": {"type": "AdamW", "params": {"dampening": 1}}})"), "of type SGD"));
  EXPECT_TRUE(has(error_of(R"({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.99]}}})"),
                  "optimizer.params.betas: unknown key; this type has no such key, but 'dampening', "));
  EXPECT_TRUE(has(error_of(R"({"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}})"),
                  "optimizer.params.eps: unknown key; this type has no such key, but 'betas', "));
  for (const std::string name : {"NAdam", "Adamax"}) {
    const std::string error = error_of((R"({"optimizer": {"type": ")" + name + R"("}})").c_str());
    EXPECT_TRUE(has(error, ("torch.optim." + name + "(parameters, …)").c_str())) << error;
  }
  EXPECT_TRUE(has(error_of(R"({"scheduler": {"type": "CosineAnnealingLR"}})"), "torch.optim.lr_scheduler."));
  EXPECT_TRUE(has(error_of(R"({"zero": {"save_muon_momentum_buffer_in_memory": true}})"),
                  "save_muon_momentum_buffer_in_memory"));
  EXPECT_FALSE(has(error_of(R"({"zero": {"save_muon_momentum_buffer_in_memory": true}})"), "not there"));
  EXPECT_TRUE(has(error_of(R"({"reduce_bucket_sise": 1})"), "did you mean 'zero_optimization.reduce_bucket_size'?"));
  EXPECT_TRUE(has(error_of(R"({"zero": {"stage3_foo": 1}})"), "unknown key; did you mean 'stage3_"));
  EXPECT_TRUE(has(error_of(R"({"optimizer": {"type": "Adma"}})"), "did you mean \"Adam\"?"));
  EXPECT_TRUE(has(error_of(R"({"optimizer": {"params": {"lr": 1}}})"),
                  "optimizer.params: the sibling key 'type' is missing; add it"));
  EXPECT_TRUE(has(error_of("{\"scheduler\":\n{\"type\": \"WarmupDecayLR\"}}"),
                  ":1: scheduler.params.total_num_steps: missing; expected an integer of at least 1"));
  EXPECT_TRUE(has(error_of(R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2]}}})"),
                  "per-group lists are not supported yet"));
}

TEST(Config, TellsAllErrorsAtOnceInTheOrderOfTheirLines) {
  const std::string error = error_of("{\"stage\": 1,\n\"gradient_clipping\": -1,\n\"zero\": {\"stage\": 4}}");
  EXPECT_EQ(error,
            "ds_config.json:1: stage: unknown key; it belongs under 'zero_optimization'\n"
            "ds_config.json:2: gradient_clipping: expected a number of at least 0, got -1\n"
            "ds_config.json:3: zero.stage: expected an integer from 0 to 3, got 4");
}

TEST(Config, RefusesDuplicateKeys) {
  EXPECT_TRUE(has(error_of("{\"zero\": {\"stage\": 1,\n \"stage\": 1}}"),
                  "ds_config.json:2: zero.stage: duplicate key, first given on line 1"));
}

TEST(Config, ReadsAFileAndNamesOneThatItCannotRead) {
  const std::string path = testing::TempDir() + "deeptide_config_test.json";
  std::ofstream(path) << "{\"zero\": {\"stage\": 2}} # end\n";
  const Config config = Config::from_file(path);
  EXPECT_EQ(config.zero().stage, 2);
  EXPECT_EQ(config.origin(), path);
  std::remove(path.c_str());
  for (const std::string& bad : {path, testing::TempDir()}) {
    EXPECT_THROW(Config::from_file(bad), ConfigError) << bad;
  }
}

TEST(EditDistance, CountsSlipsOfTheFingers) {
  EXPECT_EQ(config::edit_distance("stage", "stage"), 0u);
  EXPECT_EQ(config::edit_distance("satge", "stage"), 1u);
  EXPECT_EQ(config::edit_distance("", "abc"), 3u);
  EXPECT_EQ(config::edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(config::nearest("b", {"a"}), "");
  EXPECT_EQ(config::nearest(std::string(100'000, 'a'), {"a"}), "");
}

}  // namespace
}  // namespace deeptide
