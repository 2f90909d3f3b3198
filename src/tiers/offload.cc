// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts each buffer where the running share asks for it.
#include "tiers/offload.h"

#include <algorithm>
#include <cmath>

#include "io/queue.h"
#include "tiers/file_store.h"

namespace deeptide::tiers {

int64_t Split::resident(int64_t numel, at::ScalarType dtype) {
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t bytes = numel * item, block = swap_block_numel(dtype);
  bytes_ += bytes;
  const double wanted = ratio_ * static_cast<double>(bytes_) - static_cast<double>(bytes_in_files_);
  if (wanted <= 0.0) return numel;
  const int64_t blocks = (numel + block - 1) / block;
  const int64_t in_memory = std::clamp<int64_t>(
      std::llround((static_cast<double>(bytes) - wanted) / static_cast<double>(kSwapBlockBytes)), 0, blocks);
  const int64_t resident = std::min(numel, in_memory * block);
  bytes_in_files_ += (numel - resident) * item;
  return resident;
}

Offload::Offload(const OffloadOptions& options, std::shared_ptr<device::Ledger> ledger, device::Role role,
                 std::string what)
    : split_(options.ratio),
      ledger_(std::move(ledger)),
      role_(role),
      what_(std::move(what)),
      file_(std::make_shared<SwapFile>(options.folders)),
      staging_(std::make_shared<Staging>(io::make_queue(options.num_slots), options.num_slots, ledger_, role)) {}

Buffer Offload::place(int64_t numel, at::ScalarType dtype) {
  const int64_t resident = split_.resident(numel, dtype);
  const at::Tensor memory = device::allocate_flat(ledger_, role_, resident, dtype, at::kCPU);
  if (resident == numel) return Buffer::resident(memory);
  return file_buffer(memory, numel, file_, staging_, what_);
}

std::string Offload::text() const {
  return split_text(split_.bytes_in_memory(), split_.bytes_in_files(), *file_, *staging_);
}

}  // namespace deeptide::tiers
