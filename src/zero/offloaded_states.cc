// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Cuts each state where the running share asks for it.
#include "zero/offloaded_states.h"

#include <algorithm>
#include <cmath>

#include "io/queue.h"
#include "tiers/file_store.h"

namespace deeptide::zero {

using at::Tensor;
using tiers::Buffer;

namespace {

constexpr int64_t kBlockNumel = tiers::kSwapBlockBytes / static_cast<int64_t>(sizeof(float));

}  // namespace

OffloadedStates::OffloadedStates(const OffloadOptions& options, std::shared_ptr<device::Ledger> ledger)
    : split_(options.ratio),
      ledger_(std::move(ledger)),
      file_(std::make_shared<tiers::SwapFile>(options.folders)),
      staging_(std::make_shared<tiers::Staging>(io::make_queue(options.num_slots), options.num_slots, ledger_,
                                                device::Role::optimizer)) {}

int64_t StateSplit::resident(int64_t numel) {
  numel_ += numel;
  const double wanted = ratio_ * static_cast<double>(numel_) - static_cast<double>(numel_in_files_);
  const int64_t blocks = (numel + kBlockNumel - 1) / kBlockNumel;
  const int64_t in_memory = std::clamp<int64_t>(
      std::llround((static_cast<double>(numel) - wanted) / static_cast<double>(kBlockNumel)), 0, blocks);
  const int64_t resident = std::min(numel, in_memory * kBlockNumel);
  numel_in_files_ += numel - resident;
  return resident;
}

Buffer OffloadedStates::place(int64_t numel) {
  const int64_t resident = split_.resident(numel);
  const Tensor memory = device::allocate_flat(ledger_, device::Role::optimizer, resident, at::kFloat, at::kCPU);
  if (resident == numel) return Buffer::resident(memory);
  return tiers::file_buffer(memory, numel, file_, staging_, "optimizer states");
}

std::string OffloadedStates::text() const {
  return tiers::split_text(bytes_in_memory(), bytes_in_files(), *file_, *staging_);
}

}  // namespace deeptide::zero
