// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sets and restores the thread's autocast state.
#include "deeptide/autocast.h"

#include <ATen/autocast_mode.h>

namespace deeptide {

Autocast::Autocast(c10::DeviceType device, c10::ScalarType dtype) : device_(device) {
  TORCH_CHECK_VALUE(dtype == at::kBFloat16 || dtype == at::kHalf, "Autocast: got ", dtype,
                    ", expected BFloat16 or Half");
  enter(dtype);
}

Autocast::Autocast(const Engine& engine) : device_(engine.device().type()) {
  const PrecisionConfig& precision = engine.config().precision();
  if (precision.autocast) enter(precision.autocast_dtype == DataType::fp16 ? at::kHalf : at::kBFloat16);
}

void Autocast::enter(c10::ScalarType dtype) {
  entered_ = true;
  enabled_before_ = at::autocast::is_autocast_enabled(device_);
  dtype_before_ = at::autocast::get_autocast_dtype(device_);
  at::autocast::set_autocast_enabled(device_, true);
  at::autocast::set_autocast_dtype(device_, dtype);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (!entered_) return;
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_enabled(device_, enabled_before_);
}

}  // namespace deeptide
