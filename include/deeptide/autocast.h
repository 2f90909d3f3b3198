// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// torch.autocast for C++: LibTorch has its operators, but no scope for them.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include "deeptide/engine.h"

namespace deeptide {

/// While it lives, operators of this thread on the device run in `dtype` where that is safe, in fp32 where it is not.
/// Scopes nest. Keep one around forward and the loss, not around backward.
class DEEPTIDE_API Autocast {
 public:
  /// Errors: ValueError unless dtype is bf16 or fp16.
  Autocast(c10::DeviceType device, c10::ScalarType dtype);
  /// Follows the configuration's "torch_autocast"; does nothing where that is off.
  explicit Autocast(const Engine& engine);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  void enter(c10::ScalarType dtype);

  c10::DeviceType device_;
  bool entered_ = false;
  bool enabled_before_ = false;
  c10::ScalarType dtype_before_ = c10::ScalarType::Undefined;
};

}  // namespace deeptide
