// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Two buffers, one after the other, as one.
#pragma once

#include "tiers/buffer.h"

namespace deeptide::tiers {

/// The elements of `first`, then those of `second`, of the same type, lent in blocks of `block_numel`. It divides the
/// numel of `first`, and the blocks of both unless they are resident.
Buffer joined(Buffer first, Buffer second, int64_t block_numel);

}  // namespace deeptide::tiers
