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

/// Makes the buffer (numel,) of zeros, of the type of `resident`: the elements [0, R) that stay in memory, R a whole
/// number of blocks. The rest goes to `file`. `name`: for errors.
Buffer file_buffer(at::Tensor resident, int64_t numel, std::shared_ptr<SwapFile> file, std::shared_ptr<Staging> staging,
                   std::string name);

/// "30.0 % in memory (12.0 MiB), 70.0 % in files of /nvme (28.0 MiB, io_uring, O_DIRECT), through 48.0 MiB".
std::string split_text(int64_t bytes_in_memory, int64_t bytes_in_files, const SwapFile& file, const Staging& staging);

/// Elements of a block on disk.
inline int64_t swap_block_numel(at::ScalarType dtype) {
  return kSwapBlockBytes / static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace deeptide::tiers
