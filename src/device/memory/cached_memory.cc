// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Asks the allocator of the device's type, where torch knows it as one.
#include "device/memory/cached_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace deeptide::device {

void release_cached_memory(c10::Device device) {
  if (device.is_cpu() || device.is_meta()) return;
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator != nullptr && allocator->initialized()) allocator->emptyCache();
}

}  // namespace deeptide::device
