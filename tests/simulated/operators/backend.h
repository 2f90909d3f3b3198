// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The simulated accelerator as torch's device type PrivateUse1.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include "simulated/machine/machine.h"

namespace deeptide::simulated {

inline constexpr auto kSimulated = c10::DeviceType::PrivateUse1;

inline c10::Device simulated_device() { return {kSimulated, 0}; }
inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSimulated; }

/// The stream that this thread's operators use.
int current_stream();
/// Events that exist.
int64_t num_events();
/// How often torch has asked the driver whose memory lies at an address.
int64_t num_address_questions();
c10::Allocator& device_allocator();
const at::Generator& default_generator();
/// Whether the storage is pinned host memory of ours.
bool is_pinned(const at::Tensor& tensor);
/// Gives the storage `bytes` bytes of new memory and copies what fits.
void resize_storage(const c10::Storage& storage, size_t bytes);

/// Returns call(), whose errors become torch's.
template <typename Call>
auto with_torch_errors(const Call& call) {
  try {
    return call();
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  } catch (const OrderError& error) {
    TORCH_CHECK(false, error.what());
  }
}

}  // namespace deeptide::simulated
