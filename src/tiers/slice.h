// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A part of a buffer as a buffer.
#pragma once

#include "tiers/buffer.h"

namespace deeptide::tiers {

/// The elements of `range`. If `whole` has several blocks, blocks of the slice are as long as their common cuts allow.
Buffer slice(const Buffer& whole, Block range);

}  // namespace deeptide::tiers
