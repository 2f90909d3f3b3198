// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reserves a file for what does not stay in memory.
#include "tiers/offload.h"

#include "io/queue.h"
#include "tiers/file_store.h"

namespace deeptide::tiers {

Offload::Offload(const OffloadOptions& options, std::shared_ptr<device::Ledger> ledger, device::Role role,
                 std::string what)
    : ledger_(std::move(ledger)),
      role_(role),
      what_(std::move(what)),
      file_(std::make_shared<SwapFile>(options.folders)),
      staging_(std::make_shared<Staging>(io::make_queue(options.num_slots), options.num_slots, ledger_, role)) {}

Buffer Offload::place(int64_t numel, int64_t resident, at::ScalarType dtype) {
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  bytes_in_memory_ += resident * item;
  bytes_in_files_ += (numel - resident) * item;
  const at::Tensor memory = device::allocate_flat(ledger_, role_, resident, dtype, at::kCPU);
  if (resident == numel) return Buffer::resident(memory);
  return file_buffer(memory, numel, file_, staging_, what_);
}

std::string Offload::text() const { return split_text(bytes_in_memory_, bytes_in_files_, *file_, *staging_); }

}  // namespace deeptide::tiers
