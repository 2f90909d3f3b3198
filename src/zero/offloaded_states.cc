// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts each state where the running share asks for it.
#include "zero/offloaded_states.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "io/queue.h"
#include "tiers/file_store.h"

namespace deeptide::zero {

using at::Tensor;
using tiers::Buffer;
using tiers::kSwapBlockNumel;

OffloadedStates::OffloadedStates(const OffloadOptions& options, std::shared_ptr<device::Ledger> ledger)
    : ratio_(options.ratio),
      ledger_(std::move(ledger)),
      file_(std::make_shared<tiers::SwapFile>(options.folders)),
      staging_(std::make_shared<tiers::Staging>(io::make_queue(options.num_slots), options.num_slots, ledger_,
                                                device::Role::optimizer)) {}

Buffer OffloadedStates::place(int64_t numel) {
  numel_ += numel;
  const double wanted = ratio_ * static_cast<double>(numel_) - static_cast<double>(numel_in_files_);
  const int64_t blocks = (numel + kSwapBlockNumel - 1) / kSwapBlockNumel;
  const int64_t in_memory = std::clamp<int64_t>(
      std::llround((static_cast<double>(numel) - wanted) / static_cast<double>(kSwapBlockNumel)), 0, blocks);
  const int64_t resident = std::min(numel, in_memory * kSwapBlockNumel);
  const Tensor memory = device::allocate_flat(ledger_, device::Role::optimizer, resident, at::kFloat, at::kCPU);
  if (resident == numel) return Buffer::resident(memory);
  numel_in_files_ += numel - resident;
  return tiers::file_buffer(memory, numel, file_, staging_, "optimizer states");
}

std::string OffloadedStates::text() const {
  std::string folders;
  for (const std::string& folder : file_->folders()) folders += (folders.empty() ? "" : ", ") + folder;
  const double share = numel_ == 0 ? 0.0 : 100.0 * static_cast<double>(numel_in_files_) / static_cast<double>(numel_);
  constexpr double kMiB = 1 << 20;
  return fmt::format(
      "{:.1f} % in memory ({:.1f} MiB), {:.1f} % in files of {} ({:.1f} MiB, {}, {}), through {:.1f} MiB",
      100.0 - share, static_cast<double>(bytes_in_memory()) / kMiB, share, folders,
      static_cast<double>(bytes_in_files()) / kMiB, staging_->queue_name(),
      file_->is_direct() ? "O_DIRECT" : "through the page cache", static_cast<double>(staging_bytes()) / kMiB);
}

}  // namespace deeptide::zero
