// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// DeepSpeed's deprecated keys, and those of an optimizer that mean a key of the top level.
#include "config/check/translate.h"

namespace deeptide::config {
namespace {

constexpr const char* kOffload = "zero_optimization.cpu_offload";
constexpr const char* kOffloadParam = "zero_optimization.cpu_offload_param";
constexpr const char* kMaxNorm = "optimizer.params.max_grad_norm";
constexpr const char* kTorchAdam = "optimizer.params.torch_adam";
constexpr const char* kDecay = "optimizer.params.weight_decay";
constexpr double kTorchDecay = 0.01;  // of torch.optim.AdamW

/// False, too, for a key that this type of optimizer does not have.
bool is_given(const Values& values, const std::string& path) { return values.has(path) && values.given(path); }

bool asks(const Values& values, const std::string& path) { return is_given(values, path) && values.flag(path); }

bool asks_for_optimizer(const Values& values) {
  return asks(values, kOffload) && !is_given(values, "zero_optimization.offload_optimizer.device");
}
bool asks_for_parameters(const Values& values) {
  return asks(values, kOffloadParam) && !is_given(values, "zero_optimization.offload_param.device");
}
bool clips_in_optimizer(const Values& values) {
  return is_given(values, kMaxNorm) && values.number(kMaxNorm) > 0 && !values.given("gradient_clipping");
}
bool clips_here(const Values& values) {
  const std::string stage = to_text(values.value("zero_optimization.stage"));
  return (stage == "1" || stage == "2") && values.number("gradient_clipping") > 0;
}
bool clips_when_sharded(const Values& values) {
  return to_text(values.value("zero_optimization.stage")) != "0" && values.number("gradient_clipping") > 0;
}
bool decays_as_torch(const Values& values) {
  return asks(values, kTorchAdam) && !is_given(values, kDecay) && values.word("optimizer.type") != "Adagrad" &&
         (values.word("optimizer.type") == "AdamW" || values.flag("optimizer.params.adam_w_mode"));
}

/// torch's GradScaler halves at once and doubles every 2,000 steps; keys of the fp16 section say otherwise.
bool scales_as_torch(const Values& values) {
  const std::string precision = values.word("torch_autocast.dtype");
  const bool is_half =
      precision == "float16" || precision == "torch.float16" || precision == "fp16" || precision == "half";
  return values.flag("torch_autocast.enabled") && is_half;
}

}  // namespace

void translate(const Values& values, Config::Sections& sections) {
  if (asks_for_optimizer(values)) {
    auto& offload = std::get<OffloadOptimizerConfig>(sections);
    offload.device = OffloadDevice::cpu;
    offload.ratio = 1.0;
  }
  if (asks_for_parameters(values)) std::get<OffloadParamConfig>(sections).device = OffloadDevice::cpu;
  if (scales_as_torch(values)) {
    auto& precision = std::get<PrecisionConfig>(sections);
    if (!values.given("fp16.hysteresis")) precision.hysteresis = 1;
    if (!values.given("fp16.loss_scale_window")) precision.loss_scale_window = 2000;
  }
  if (clips_in_optimizer(values)) std::get<GradientConfig>(sections).clipping = values.number(kMaxNorm);
  if (decays_as_torch(values)) std::get<OptimizerConfig>(sections).defaults.set("weight_decay", kTorchDecay);
}

void note_translations(const Values& values, std::vector<std::string>& decisions) {
  const auto note = [&](const std::string& path, const std::string& meaning) {
    decisions.push_back(path + ": " + meaning);
  };
  const bool is_muon = values.word("optimizer.type") == "Muon";
  if (is_muon && values.word("scheduler.type") == "OneCycle") {
    note("scheduler.params.cycle_momentum", "no effect with Muon, as in DeepSpeed; its momentum stays");
  }
  if (is_muon && clips_here(values)) {
    note("gradient_clipping",
         "clips gradients; DeepSpeed's stages 1 and 2 clip Muon's updates, so a rate that was tuned "
         "there moves more here");
  }
  if (scales_as_torch(values) && clips_when_sharded(values)) {
    note(
        "gradient_clipping",
        "clips unscaled gradients; under torch_autocast in float16 DeepSpeed's stages 1 to 3 clip them before they are "
        "unscaled, so that far less is left of them");
  }
  if (asks_for_optimizer(values)) note(kOffload, "true means offload_optimizer {\"device\": \"cpu\"}");
  if (asks_for_parameters(values)) note(kOffloadParam, "true means offload_param {\"device\": \"cpu\"}");
  if (clips_in_optimizer(values)) note(kMaxNorm, "means gradient_clipping, which is not given");
  if (decays_as_torch(values))
    note(kTorchAdam, "true means torch's AdamW, whose weight_decay is 0.01 where none is given");
}

}  // namespace deeptide::config
