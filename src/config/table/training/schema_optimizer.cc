// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The table's "optimizer" section; its params depend on the type.
#include "config/table/schema_sections.h"

namespace deeptide::config {
namespace {

Key learning_rate(double fallback = 1e-3) { return number("lr", fallback, "Learning rate.").at_least(0); }

Key weight_decay() { return number("weight_decay", 0.0, "Weight decay.").at_least(0); }

Key eps(double fallback = 1e-8) { return number("eps", fallback, "Added to the denominator.").at_least(0); }

Key betas(double second = 0.999) {
  Key key = list("betas", Kind::number, numbers({0.9, second}), "Decay rates of the two moments.").below_one();
  key.length = 2;
  return key;
}

Key bias_correction() { return flag("bias_correction", true, "Correct the moments for their start at zero."); }

Key max_grad_norm() {
  return number("max_grad_norm", {}, "Above 0: gradient_clipping (top level), where that is not given.")
      .at_least(0)
      .not_in_groups();
}

/// How torch loops over the parameters: it changes no result.
const char* const kOneKernel = "one fused kernel with torch's formulas runs on every device";

Key foreach_loops() {
  return flag("foreach", {}, "torch's loop over lists of parameters.").off_at(JsonValue(false)).never(kOneKernel);
}

Key fused() { return flag("fused", {}, "torch's fused kernel.").off_at(JsonValue(true)).never(kOneKernel); }

Key fp32_optimizer_states() {
  return flag("fp32_optimizer_states", true, "Moments in fp32.")
      .later("bf16.bf16_optimizer_states is for all optimizers");
}

std::vector<Key> operator+(std::vector<Key> a, const std::vector<Key>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<Key> adam_keys() {
  return {
      learning_rate(),
      betas(),
      eps(),
      weight_decay(),
      bias_correction(),
      flag("adam_w_mode", true, "Decoupled decay (AdamW), also for type Adam; false: L2 added to the gradient.")
          .in_torch("decoupled_weight_decay"),
      flag("torch_adam", false,
           "Use torch's own Adam: without weight_decay, that of AdamW is 0.01. One fused kernel with torch's formulas "
           "runs in any case.")
          .not_in_groups(),
      flag("amsgrad", false, "The AMSGrad variant.").later(),
      fp32_optimizer_states(),
      foreach_loops(),
      fused(),
      max_grad_norm(),
  };
}

std::vector<Key> sgd_keys() {
  return {
      learning_rate(),
      number("momentum", 0.0, "Momentum.").at_least(0),
      number("dampening", 0.0, "Dampening of the momentum."),
      weight_decay(),
      flag("nesterov", false, "Nesterov's momentum; needs a momentum and no dampening."),
      flag("maximize", false, "Ascend instead of descend.").later(),
      foreach_loops(),
      fused(),
      max_grad_norm(),
  };
}

std::vector<Key> adagrad_keys() {
  return {
      learning_rate(1e-2),
      number("lr_decay", 0.0, "Decay of the learning rate per step.").at_least(0),
      eps(1e-10),
      weight_decay(),
      fp32_optimizer_states(),
      foreach_loops(),
      fused(),
      max_grad_norm(),
  };
}

std::vector<Key> rmsprop_keys() {
  return {
      learning_rate(1e-2),
      number("alpha", 0.99, "Decay rate of the squares' average.").below_one(),
      eps(),
      weight_decay(),
      number("momentum", 0.0, "Momentum.").at_least(0),
      flag("centered", false, "Divide by the standard deviation: the average gradient is subtracted."),
      flag("maximize", false, "Ascend instead of descend.").later(),
      foreach_loops(),
      max_grad_norm(),
  };
}

std::vector<Key> lion_keys() {
  Key rates = betas();
  rates.doc = "Weights of the momentum in the step's direction, and in the momentum kept.";
  return {
      learning_rate(), std::move(rates), weight_decay(), fp32_optimizer_states(), max_grad_norm(),
  };
}

std::vector<Key> lamb_bounds(double max_coeff) {
  return {number("max_coeff", max_coeff, "Upper bound of the trust ratio.").at_least(0),
          number("min_coeff", 0.01, "Lower bound of the trust ratio.").at_least(0)};
}

Key freeze_step() {
  return integer("freeze_step", 100'000, "Steps with the gradients' mean, before ranks exchange signs.").at_least(0);
}

/// The keys that all 1-bit optimizers have.
std::vector<Key> one_bit_keys() {
  return {learning_rate(),
          bias_correction().never("as in DeepSpeed, 1-bit optimizers do not correct the moments"),
          betas(),
          eps(),
          flag("eps_inside_sqrt", false, "Add eps inside the root.").never("as in DeepSpeed, eps is added to the root"),
          weight_decay(),
          flag("cuda_aware", false, "The MPI library reads device memory.").never("signs travel as all else does"),
          choice("comm_backend_name", "nccl", {"nccl", "mpi", "hccl", "compressed"}, "Transport.")
              .either("signs travel as all else does"),
          max_grad_norm()};
}

std::vector<Key> lamb_keys() {
  return std::vector<Key>{learning_rate(),
                          bias_correction(),
                          betas(),
                          eps(),
                          flag("eps_inside_sqrt", false, "Add eps inside the root."),
                          weight_decay(),
                          max_grad_norm()} +
         lamb_bounds(10.0);
}

std::vector<Key> zero_one_keys() {
  return one_bit_keys() +
         std::vector<Key>{
             integer("var_freeze_step", 100'000, "Steps after which the second moment stays for good.").at_least(0),
             integer("var_update_scaler", 16,
                     "Steps with the gradients' mean, in which the second moment moves, before their interval doubles.")
                 .between(1, 1e9),
             integer("local_step_scaler", 32'678, "Steps before the interval between exchanges doubles.")
                 .never("the interval is 1: see local_step_clipper"),
             integer("local_step_clipper", 1, "Longest interval between exchanges; 16 in DeepSpeed if absent.")
                 .at_least(1)
                 .later("between exchanges ranks would hold different parameters")};
}

std::vector<Key> one_bit_lamb_keys() {
  return one_bit_keys() + lamb_bounds(10.0) +
         std::vector<Key>{
             freeze_step(),
             number("coeff_beta", 0.9, "Decay rate of the mean of trust ratios, which later steps keep.").below_one(),
             number("factor_max", 4.0, "Upper bound of the factor by which a kept ratio still moves.").at_least(1),
             number("factor_min", 0.5, "Lower bound of the factor.").between(0, 1),
             number("factor_threshold", 0.1, "Largest relative change of the factor in a step.").at_least(0)};
}

/// In a param group of matrices "eps" is the least norm by which one is divided, as in torch.optim.Muon.
std::vector<Key> muon_keys() {
  Key coefficients = list("ns_coefficients", Kind::number, numbers({3.4445, -4.7750, 2.0315}),
                          "Coefficients of Newton-Schulz' polynomial of degree five.");
  coefficients.length = 3;
  return {
      learning_rate(0.02),
      number("muon_lr", {}, "Learning rate of matrices.").at_least(0).derives("lr").not_in_groups(),
      number("adam_lr", {}, "Learning rate of the rest.").at_least(0).derives("lr, or 3e-4").not_in_groups(),
      number("momentum", 0.95, "Momentum of matrices.").below_one(),
      flag("nesterov", true, "Nesterov's momentum."),
      weight_decay(),
      betas(0.95),
      eps(1e-10),
      integer("ns_steps", 5, "Iterations of Newton-Schulz.").between(1, 99),
      std::move(coefficients),
      flag("match_rms_adamw", false,
           "Scale a matrix's rate by 0.2 sqrt(max(rows, columns)) instead of sqrt(max(1, rows / columns))."),
      flag("adam_w_mode", true, "Of the rest: decoupled decay (AdamW); false: L2 added to the gradient.")
          .in_torch("decoupled_weight_decay"),
      flag("use_muon", true, "False, as in a param group: AdamW for all."),
      choice("ns_method", "gram", {"gram", "standard"}, "How Newton-Schulz is iterated.")
          .either("both iterate one polynomial; here on the matrix, in bf16")
          .not_in_groups(),
      max_grad_norm(),
  };
}

/// A row per optimizer: the names of its type, then its hyper-parameters.
std::vector<Variant> params_by_type() {
  return {
      {.types = {"Adam", "AdamW"}, .keys = adam_keys()},
      {.types = {"SGD"}, .keys = sgd_keys()},
      {.types = {"Lion"}, .keys = lion_keys()},
      {.types = {"Adagrad"}, .keys = adagrad_keys()},
      {.types = {"RMSprop"}, .keys = rmsprop_keys()},
      {.types = {"Lamb"}, .keys = lamb_keys()},
      {.types = {"Muon"}, .keys = muon_keys()},
      {.types = {"OneBitAdam"}, .keys = one_bit_keys() + std::vector<Key>{freeze_step()}},
      {.types = {"ZeroOneAdam"}, .keys = zero_one_keys()},
      {.types = {"OneBitLamb"}, .keys = one_bit_lamb_keys()},
      {.types = {"MuAdam", "MuAdamW", "MuSGD"}, .keys = {}, .open = true, .later = true},
  };
}

}  // namespace

std::vector<Key> optimizer_sections() {
  std::vector<std::string> types, later;
  for (const Variant& variant : params_by_type()) {
    types.insert(types.end(), variant.types.begin(), variant.types.end());
    if (variant.later) later.insert(later.end(), variant.types.begin(), variant.types.end());
  }
  return {section("optimizer", "The optimizer, when the program hands over none.",
                  {
                      choice("type", {}, types, "Which optimizer.")
                          .ignoring_case()
                          .not_yet(later)
                          .derives("no optimizer of the configuration's own"),
                      section("params", "Its hyper-parameters.", {}).by_type(params_by_type()),
                      flag("legacy_fusion", false, "DeepSpeed's older fused optimizers.")
                          .never("one fused kernel with torch's formulas runs on every device"),
                  })
              .read_by("config::optimizer_config")};
}

}  // namespace deeptide::config
