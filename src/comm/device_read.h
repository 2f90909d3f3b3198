// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads what a device computes from other ranks' data, without a wait that nothing ends where a rank is lost.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/group.h"

namespace deeptide::comm {

/// Returns the tensor on the host, as `tensor.cpu()` does. A lost rank leaves a device in a collective for ever, and a
/// host that synchronizes with it too: between ranks this looks again and again whether the device is done instead.
/// Errors: as Group::wait.
at::Tensor read_on_host(Group& group, const at::Tensor& tensor, const Site& site);

}  // namespace deeptide::comm
