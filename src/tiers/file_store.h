// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A buffer whose first blocks are resident and whose others lie in files.
#pragma once

#include <memory>
#include <string>

#include "tiers/buffer.h"
#include "tiers/staging.h"
#include "tiers/swap_file.h"

namespace deeptide::tiers {

/// Makes the buffer (numel,) of zeros. `resident`: the elements [0, R) that stay in memory, R a whole number of blocks;
/// the rest goes to `file`. `name`: for errors.
Buffer file_buffer(at::Tensor resident, int64_t numel, std::shared_ptr<SwapFile> file, std::shared_ptr<Staging> staging,
                   std::string name);

/// Elements of a block on disk, fp32.
inline constexpr int64_t kSwapBlockNumel = kSwapBlockBytes / static_cast<int64_t>(sizeof(float));

}  // namespace deeptide::tiers
