// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The numbers of one step that the rules with kernels compute once per segment: in double, rounded to float once, so
// that every implementation uses the same ones. No torch.
#pragma once

#include <variant>

namespace deeptide::optim {

struct AdamScalars {
  float l2_decay;       // 0 when decoupled
  float keep;           // 1 - lr * weight_decay when decoupled, else 1
  float first_weight;   // 1 - beta1
  float second_weight;  // 1 - beta2
  float second_keep;    // beta2
  float step_size;      // lr / (1 - beta1^t)
  float root_scale;     // sqrt(1 - beta2^t)
  float eps;
};

struct AdagradScalars {
  float step_size;  // lr / (1 + (t - 1) * lr_decay)
  float l2_decay;
  float eps;
};

struct LionScalars {
  float lr;
  float keep;                          // 1 - lr * weight_decay
  float direction_keep, direction_in;  // beta1, 1 - beta1
  float momentum_keep, momentum_in;    // beta2, 1 - beta2
};

struct RmspropScalars {
  float lr;
  float l2_decay;
  float keep;    // alpha
  float weight;  // 1 - alpha
  float eps;
  float momentum;  // 0: no state
};

struct SgdScalars {
  float l2_decay;
  float lr;
  float momentum;       // 0: no state
  float gradient_keep;  // 1 - dampening; 1 in the first step, so that a momentum of zeros becomes the gradient
  bool nesterov;
};

/// Read by both of LAMB's passes, which have kernels of their own.
struct LambScalars {
  float first_weight;   // 1 - beta1
  float second_weight;  // 1 - beta2
  float second_keep;    // beta2
  float eps;
  float decay;
  float step_size;  // with bias correction and ratio
  float gradient_scale;
  bool eps_inside_sqrt;
  bool mean_where_unreached;
};

/// The scalars of any rule that has a kernel of one pass.
using UpdateScalars = std::variant<AdamScalars, AdagradScalars, LionScalars, RmspropScalars, SgdScalars>;

}  // namespace deeptide::optim
