// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hands blocks to the writer from live state, or from the copies that were taken of it in time.
#include "checkpoint/save/live_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "checkpoint/save/block_writer.h"
#include "deeptide/errors.h"

namespace deeptide::checkpoint {

using at::Tensor;

namespace {

int64_t item_bytes(const PieceData& data) { return static_cast<int64_t>(c10::elementSize(data.dtype())); }

/// Not at::copy_, whose threads would compete with those that train.
void copy_elements(const Tensor& from, const Tensor& to) {
  if (from.is_cpu() && from.is_contiguous()) {
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  } else {
    to.copy_(from);
  }
}

void read_live(const PieceData& live, int64_t begin, const Tensor& block) {
  if (live.transfer()) return live.transfer()(begin, block);
  copy_elements(live.tensor().view({-1}).narrow(0, begin, block.numel()), block);
}

}  // namespace

void LiveState::protect(std::vector<Piece>& pieces) {
  for (Piece& piece : pieces) {
    const int64_t numel = piece.region.numel();
    if (numel == 0) continue;
    Source* source = sources_.emplace_back(std::make_unique<Source>()).get();
    source->live = piece.data;
    source->numel = numel;
    unkept_[piece.changes_with].push_back(source);
    piece.data = {piece.data.dtype(),
                  [this, source](int64_t begin, const Tensor& block) { take(*source, begin, block); }};
  }
}

/// Blocks are consecutive, so a block begins at the element `read`.
void LiveState::take(Source& source, int64_t begin, const Tensor& block) {
  const at::NoGradGuard no_grad;
  for (int64_t done = 0; done < block.numel();) {
    const Tensor rest = block.narrow(0, done, block.numel() - done);
    if (const int64_t copied = take_copied(source, rest); copied > 0) {
      done += copied;
      continue;
    }
    read_live(source.live, begin + done, rest);
    const std::lock_guard lock(mutex_);
    source.in_use = false;
    source.read += rest.numel();
    source.kept = std::max(source.kept, source.read);
    moved_.notify_all();
    return;
  }
}

/// Returns how many elements came from the first copy; 0: there is none, and the live ones are in use from now on.
int64_t LiveState::take_copied(Source& source, const Tensor& block) {
  Copy* copy = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!lost_.empty()) throw CheckpointError(lost_);
    if (source.copies.empty()) {
      source.in_use = true;
      return 0;
    }
    copy = &source.copies.front();
  }
  // Only this thread takes copies away.
  const int64_t first = source.read - copy->begin;
  const int64_t count = std::min(block.numel(), copy->values.numel() - first);
  copy_elements(copy->values.narrow(0, first, count), block.narrow(0, 0, count));
  const std::lock_guard lock(mutex_);
  source.read += count;
  if (first + count == copy->values.numel()) {
    bytes_ -= static_cast<int64_t>(copy->values.nbytes());
    source.copies.pop_front();
    moved_.notify_all();
  }
  return count;
}

void LiveState::changing(int group) {
  const at::NoGradGuard no_grad;
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  const auto found = unkept_.find(group);
  if (found == unkept_.end()) return;
  for (Source* source : found->second) keep(*source, lock);
  unkept_.erase(found);
  waited_ += std::chrono::steady_clock::now() - start;
}

/// Copies what the writer has not read, in blocks, as there is room.
void LiveState::keep(Source& source, std::unique_lock<std::mutex>& lock) {
  const int64_t width = item_bytes(source.live);
  while (!released_ && source.kept < source.numel) {
    const int64_t count = std::min(source.numel - source.kept, kBlockBytes / width);
    const bool fits = bytes_ == 0 || bytes_ + count * width <= most_bytes_;
    if (source.in_use || !fits) {
      moved_.wait(lock);
      continue;
    }
    // The writer waits meanwhile, so that it cannot read these elements too.
    Copy copy{source.kept, {}};
    try {
      copy.values = at::empty({count}, at::TensorOptions().dtype(source.live.dtype()));
      read_live(source.live, copy.begin, copy.values);
    } catch (const std::exception& error) {
      lost_ = std::string("state that was about to change could not be copied for the save: ") + error.what();
      released_ = true;
      moved_.notify_all();
      return;
    }
    bytes_ += count * width;
    peak_bytes_ = std::max(peak_bytes_, bytes_);
    source.kept += count;
    source.copies.push_back(std::move(copy));
  }
  moved_.wait(lock, [&] { return released_ || !source.in_use; });
}

void LiveState::release() {
  const std::lock_guard lock(mutex_);
  released_ = true;
  moved_.notify_all();
}

void LiveState::give_up() {
  const std::lock_guard lock(mutex_);
  if (lost_.empty()) lost_ = "the save was given up";
  released_ = true;
  moved_.notify_all();
}

std::chrono::nanoseconds LiveState::waited() const {
  const std::lock_guard lock(mutex_);
  return waited_;
}

int64_t LiveState::peak_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_bytes_;
}

}  // namespace deeptide::checkpoint
