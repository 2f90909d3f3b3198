// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Configurations as people have them: what Hugging Face, Lightning and DeepSpeed's examples give runs, or is refused by
// the name of what is not here.
#include <gtest/gtest.h>

#include <algorithm>

#include "config/table_cases.h"
#include "deeptide/config.h"

namespace deeptide::config {
namespace {

bool mentions(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string decisions_of(const std::string& text) {
  const Config config = Config::from_text(text);
  std::string lines;
  for (const std::string& line : config.decisions()) lines += line + "\n";
  return lines;
}

TEST(RealConfigs, OfATrainerWithEveryValueAutomatic) {
  const std::string text = R"({
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
             "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR",
                  "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
      "offload_optimizer": {"device": "none", "pin_memory": true}, "offload_param": {"device": "none"},
      "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
      "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
      "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false})";
  EXPECT_EQ(error_of(text), "");
  EXPECT_FALSE(mentions(decisions_of(text), "no effect here")) << decisions_of(text);
}

TEST(RealConfigs, OfDeepSpeedsExamples) {
  const std::string text = R"({
    "train_batch_size": 16, "steps_per_print": 2000, "prescale_gradients": true, "gradient_clipping": 1.0,
    "disable_allgather": true, "cuda_visible_devices": 0, "wall_clock_breakdown": false,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
    "bf16": {"enabled": false},
    "fp16": {"enabled": true, "fp16_master_weights_and_grads": false, "loss_scale": 0, "loss_scale_window": 500,
             "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15},
    "zero_optimization": {"stage": 2, "allgather_partitions": true, "reduce_scatter": true,
      "allgather_bucket_size": 5e7, "reduce_bucket_size": 5e7, "overlap_comm": true, "contiguous_gradients": false,
      "sub_group_size": 1e12, "cpu_offload": false}})";
  EXPECT_EQ(error_of(text), "");
  EXPECT_TRUE(mentions(decisions_of(text),
                       "no effect here: prescale_gradients, disable_allgather, cuda_visible_devices, "
                       "zero_optimization.contiguous_gradients, zero_optimization.sub_group_size (docs/config.md"))
      << decisions_of(text);
}

TEST(RealConfigs, OfLightning) {
  EXPECT_EQ(error_of(R"({
    "activation_checkpointing": {"partition_activations": false, "cpu_checkpointing": false,
      "contiguous_memory_optimization": false, "synchronize_checkpoint_boundary": false},
    "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": false, "overlap_events": true,
            "thread_count": 1},
    "zero_allow_untested_optimizer": true, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2, "contiguous_gradients": true, "overlap_comm": true,
      "allgather_partitions": true, "reduce_scatter": true, "allgather_bucket_size": 200000000,
      "reduce_bucket_size": 200000000, "sub_group_size": 1000000000000}})"),
            "");
}

TEST(RealConfigs, OfPeopleWhoTune) {
  const std::string text = R"({
    "_comment": "from a colleague", "train_batch_size": 8, "compile": {"disable": false, "backend": "inductor"},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": true, "adam_w_mode": true}},
    "torch_autocast": {"enabled": true, "dtype": "torch.bfloat16"},
    "activation_checkpointing": {"partition_activations": true, "contiguous_memory_optimization": true},
    "aio": {"block_size": 8388608, "queue_depth": 32, "intra_op_parallelism": 8, "use_gds": true},
    "zero_optimization": {"stage": 3, "sub_group_size": 0, "round_robin_gradients": true,
      "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
      "offload_param": {"device": "none", "buffer_size": "auto", "max_in_cpu": 1e9}}})";
  EXPECT_EQ(error_of(text), "");
  EXPECT_EQ(Config::from_text(text).precision().autocast_dtype, DataType::bf16);
  EXPECT_TRUE(mentions(decisions_of(text),
                       "no effect here: zero_optimization.round_robin_gradients, "
                       "zero_optimization.sub_group_size, aio ("))
      << decisions_of(text);
}

// A quantization_period of 0 lowers the bits in every step.
TEST(RealConfigs, OfCompressionThatIsOffOrOn) {
  const auto text = [](const char* enabled, const char* pruning) {
    return std::string(R"({"train_batch_size": 32, "compression_training": {
      "weight_quantization": {
        "shared_parameters": {"enabled": )") +
           enabled + R"(, "quantize_groups": 64, "fp16_mixed_quantize": {"enabled": false}},
        "different_groups": {"wq1": {"params": {"start_bits": 8, "target_bits": 8, "quantization_period": 0},
                                     "modules": ["attention.self"]}}},
      "sparse_pruning": {"shared_parameters": {"enabled": )" +
           pruning + R"(, "method": "l1"},
                         "different_groups": {"sp1": {"params": {"dense_ratio": 0.5}, "modules": ["attention"]}}}}})";
  };
  for (const char* quantized : {"false", "true"}) {
    for (const char* pruned : {"false", "true"}) EXPECT_EQ(error_of(text(quantized, pruned)), "");
  }
  EXPECT_TRUE(mentions(error_of(text("true", "1")),
                       "compression_training.sparse_pruning.shared_parameters.enabled: expected true or false"))
      << error_of(text("true", "1"));
}

TEST(RealConfigs, ThatAskForWhatIsNotHereAreRefusedByItsName) {
  for (
      const auto& [text, name] : std::initializer_list<std::pair<const char*, const char*>>{
          {R"({"compression_training": {"sparse_pruning": {"shared_parameters": {"enabled": true,
                "method": "snip_momentum"}}}})",
           "method: \"snip_momentum\" is not supported yet (DeepSpeed called a package for it that was never "
           "published); choose \"l1\" or \"topk\""},
          {R"({"sequence_parallel_size": 2})", "sequence_parallel_size: 2 is not supported yet"},
          {R"({"tensor_parallel": {"replace_with_kernel_inject": true}})",
           "tensor_parallel.replace_with_kernel_inject: true is not supported yet"},
          {R"({"bf16": {"enabled": true, "bf16_optimizer_states": true}})",
           "bf16.bf16_optimizer_states: true needs bf16_master_weights_and_grads"},
          {R"({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp16"}})",
           "data_types.grad_accum_dtype: \"fp16\" needs fp16.enabled"},
          {R"({"fp16": {"enabled": true, "fp16_master_weights_and_grads": true},
                "data_types": {"grad_accum_dtype": "fp32"}})",
           "data_types.grad_accum_dtype: \"fp32\" contradicts fp16.fp16_master_weights_and_grads"},
          {R"({"optimizer": {"type": "ZeroOneAdam", "params": {"local_step_scaler": 1000, "local_step_clipper": 16}}})",
           "local_step_clipper: 16 is not supported yet (between exchanges ranks would hold different parameters); set "
           "it to 1 or remove it"},
          {R"({"data_efficiency": {"enabled": true, "data_routing": {"enabled": true, "random_ltd": {"enabled": true,
                "layer_token_lr_schedule": {"enabled": true}}}}})",
           "layer_token_lr_schedule.enabled: true is not supported yet (DeepSpeed refuses it as well)"},
      }) {
    EXPECT_TRUE(mentions(error_of(text), name)) << error_of(text);
  }
}

TEST(RealConfigs, OfOlderSpellingsMeanThePresentOnes) {
  const auto offloaded = Config::from_text(R"({"zero_optimization": {"stage": 3, "cpu_offload": true,
                                               "cpu_offload_param": true, "cpu_offload_use_pin_memory": true}})");
  EXPECT_EQ(offloaded.offload_optimizer().device, OffloadDevice::cpu);
  EXPECT_EQ(offloaded.offload_optimizer().ratio, 1.0);
  EXPECT_EQ(offloaded.offload_param().device, OffloadDevice::cpu);
  const auto half = Config::from_text(R"({"torch_autocast": {"enabled": true, "dtype": "float16"}})");
  EXPECT_EQ(half.precision().hysteresis, 1) << "as torch's GradScaler";
  EXPECT_EQ(half.precision().loss_scale_window, 2000);
  const auto patient = Config::from_text(R"({"torch_autocast": {"enabled": true, "dtype": "float16"},
                                             "fp16": {"hysteresis": 3}})");
  EXPECT_EQ(patient.precision().hysteresis, 3);
  const auto off = Config::from_text(R"({"zero_optimization": {"stage": 2, "cpu_offload": false}})");
  EXPECT_EQ(off.offload_optimizer().device, OffloadDevice::none);

  const std::string clipped = R"({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 0.5}})";
  EXPECT_EQ(Config::from_text(clipped + "}").gradients().clipping, 0.5);
  EXPECT_TRUE(mentions(decisions_of(clipped + "}"), "optimizer.params.max_grad_norm: means gradient_clipping"));
  EXPECT_EQ(Config::from_text(clipped + R"(, "gradient_clipping": 2.0})").gradients().clipping, 2.0);

  const std::string adam = R"({"optimizer": {"type": "AdamW", "params": {"torch_adam": true)";
  EXPECT_EQ(Config::from_text(adam + "}}}").optimizer().defaults.get("weight_decay"), 0.01);
  EXPECT_EQ(Config::from_text(adam + R"(, "weight_decay": 0.0}}})").optimizer().defaults.get("weight_decay"), 0.0);
  const std::string other = R"(, "adam_w_mode": false}}})";
  EXPECT_EQ(Config::from_text(adam + other).optimizer().defaults.get("weight_decay"), 0.01) << "AdamW all the same";
  const std::string plain = R"({"optimizer": {"type": "Adam", "params": {"torch_adam": true)";
  EXPECT_EQ(Config::from_text(plain + other).optimizer().defaults.get("weight_decay"), 0.0) << "torch's Adam";
}

TEST(RealConfigs, ThatObserveRun) {
  const std::string text = R"({"wall_clock_breakdown": true, "memory_breakdown": true,
    "flops_profiler": {"enabled": true}, "comms_logger": {"enabled": true}, "tensorboard": {"enabled": true},
    "csv_monitor": {"enabled": true}, "wandb": {"enabled": true}, "comet": {"enabled": true},
    "checkpoint": {"load_universal": true}, "activation_checkpointing": {"cpu_checkpointing": true}})";
  EXPECT_EQ(error_of(text), "");
  const Config config = Config::from_text(text);
  EXPECT_TRUE(config.report().wall_clock_breakdown && config.report().memory_breakdown);
  EXPECT_TRUE(config.flops_profiler().enabled && config.comms_logger().enabled && config.tensorboard().enabled &&
              config.csv_monitor().enabled && config.wandb().enabled && config.comet().enabled);
}

TEST(RealConfigs, AreNotRefusedForWhatIsSoAnyway) {
  for (const char* text :
       {R"({"bf16": {"enabled": true}, "data_types": {"param_dtype": "bf16", "grad_accum_dtype": "float32"}})",
        R"({"zero_optimization": {"stage": 2, "overlap_comm": null, "compute_grad_norm": true}})",
        R"({"$schema": "ds_config.schema.json", "communication_data_type": "FP16"})",
        R"({"fp16": {"enabled": true, "min_loss_scale": 0}, "timers": {"throughput": {"enabled": false}}})",
        R"({"optimizer": {"type": "AdamW", "params": {"foreach": true, "fused": true}}})"}) {
    EXPECT_EQ(error_of(text), "") << text;
  }
  EXPECT_TRUE(mentions(error_of(R"({"bf16": {"enabled": true}, "data_types": {"param_dtype": "fp16"}})"),
                       "contradicts the sections fp16 and bf16"));
}

TEST(RealConfigs, TakeABudgetOfActivationsWithItsPolicyAlone) {
  const auto with = [](const std::string& keys) { return R"({"activation_checkpointing": {)" + keys + "}}"; };
  for (const char* size : {"\"6GiB\"", "\"1.5 GB\"", "1000000", "5e8"}) {
    EXPECT_EQ(error_of(with(R"("policy": "auto", "memory": )" + std::string(size))), "") << size;
  }
  for (const char* size : {"\"6Gib\"", "\"40%\"", "\"rest\"", "\"0GiB\"", "0", "-5", "true", "[1]"}) {
    EXPECT_TRUE(mentions(error_of(with(R"("policy": "auto", "memory": )" + std::string(size))),
                         "activation_checkpointing.memory: expected a size above 0"))
        << size;
  }
  for (const char* policy : {R"("policy": "recompute", )", R"("policy": "none", )", ""}) {
    EXPECT_TRUE(mentions(error_of(with(policy + std::string(R"("memory": "6GiB")"))),
                         "is the budget of activation_checkpointing.policy \"auto\""))
        << policy;
  }
  EXPECT_TRUE(mentions(error_of(with(R"("policy": "recomputed")")), "activation_checkpointing.policy"));
}

TEST(RealConfigs, KeepMisspellingsErrorsWhereSectionsAreOff) {
  EXPECT_TRUE(mentions(error_of(R"({"zero": {"offload_param": {"device": "none", "bufer_size": "auto"}}})"),
                       "zero.offload_param.bufer_size: unknown key; did you mean 'buffer_size'?"));
  EXPECT_TRUE(
      mentions(error_of(R"({"compression_training": {"sparse_pruning": {"shared_parameters": {"enable": false}}}})"),
               "unknown key; did you mean 'enabled'?"));
  EXPECT_TRUE(mentions(error_of(R"({"prescale_gradient": true})"), "did you mean 'prescale_gradients'?"));
}

}  // namespace
}  // namespace deeptide::config
