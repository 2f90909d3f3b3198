// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Asks for what torch's allocator keeps of a device's memory after tensors have freed it.
#pragma once

#include <c10/core/Device.h>

namespace deeptide::device {

/// Gives it back to the device, and waits for the device where something was kept. Nothing on a CPU.
void release_cached_memory(c10::Device device);

}  // namespace deeptide::device
