// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Collectives of device tensors, as tasks of a stream of their own.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace deeptide::simulated {

/// Returns a backend like NCCL's: its work follows the caller's stream, runs on the backend's, and Work::wait() orders
/// the caller's current stream after it. The first collective keeps the host until all ranks have come to theirs, which
/// counts as a wait of the host. `host` (Gloo) moves the bytes.
c10::intrusive_ptr<c10d::Backend> make_collectives(c10::intrusive_ptr<c10d::Backend> host);

}  // namespace deeptide::simulated
