// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Looks up streams in c10's generic interface, so that this compiles with every torch.
#include "numerics/kernels/kernel_tensors.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/invariant.h"
#include "device/lane.h"
#include "device/torch_versions.h"

namespace deeptide::numerics {
namespace {

using at::Tensor;

kernel::NumberType number_type(at::ScalarType dtype) {
  if (dtype == at::kFloat) return kernel::NumberType::fp32;
  return dtype == at::kBFloat16 ? kernel::NumberType::bf16 : kernel::NumberType::fp16;
}

std::optional<c10::OperatorHandle> operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchema({std::string("deeptide_kernels::") + name, ""});
}

}  // namespace

namespace detail {

bool brings_kernels(at::Device device) {
  if (!device.is_privateuseone()) return false;
  const auto available = operator_named("available");
  return available && available->typed<bool()>().call();
}

void run_brought(const char* name, const void* arguments) {
  const auto kernel = operator_named(name);
  DEEPTIDE_INVARIANT(kernel.has_value(), "a device brings kernels, but none named ", name);
  kernel->typed<void(int64_t)>().call(reinterpret_cast<int64_t>(arguments));
}

bool has_kernel_on(at::Device device, bool (*has_kernel)()) {
  if (!device.is_cuda() || !device::tells_native_handles()) return false;
  static std::mutex mutex;
  static std::map<std::pair<at::DeviceIndex, bool (*)()>, bool> known;
  const std::lock_guard lock(mutex);
  const auto [place, is_new] = known.try_emplace({device.index(), has_kernel}, false);
  if (is_new) {
    const c10::DeviceGuard guard(device);
    place->second = has_kernel();
  }
  return place->second;
}

void launch_on(at::Device device, c10::function_ref<void(void* stream)> launch) {
  const c10::DeviceGuard guard(device);
  launch(device::Lane::current(device).handle());
}

}  // namespace detail

kernel::Numbers numbers_of(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.mutable_data_ptr(), number_type(tensor.scalar_type())};
}

kernel::Numbers read_numbers_of(const Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), number_type(tensor.scalar_type())};
}

kernel::Rows rows_of(at::TensorList rows, float scale) {
  DEEPTIDE_INVARIANT(rows.size() <= kernel::Rows::kMost, "a kernel is given ", rows.size(), " rows");
  kernel::Rows made;
  for (const Tensor& row : rows) made.data[made.count++] = row.const_data_ptr();
  made.type = number_type(rows[0].scalar_type());
  made.scale = scale;
  return made;
}

}  // namespace deeptide::numerics
