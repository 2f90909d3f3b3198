// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs the two halves of a save in a thread, one after the other.
#include "checkpoint/save/background_save.h"

#include <chrono>
#include <exception>
#include <filesystem>
#include <utility>

#include "base/interrupt.h"
#include "base/resources.h"
#include "checkpoint/format/file_io.h"
#include "checkpoint/format/part_folders.h"

namespace deeptide::checkpoint {
namespace {

using std::chrono::steady_clock;

bool is_busy(SavePhase phase) { return phase == SavePhase::writing || phase == SavePhase::committing; }

/// Changes while anybody still writes there.
int64_t bytes_in(const std::string& folder) {
  int64_t bytes = 0;
  std::error_code ignored;
  for (const auto& item : std::filesystem::directory_iterator(folder, ignored)) {
    const auto size = item.file_size(ignored);
    if (!ignored) bytes += 1 + static_cast<int64_t>(size);
  }
  return bytes;
}

}  // namespace

BackgroundSave::BackgroundSave(SavePlan plan, int64_t most_kept_bytes)
    : plan_(std::move(plan)), live_(most_kept_bytes) {
  live_.protect(plan_.snapshot.pieces);
  run(SavePhase::writing, SavePhase::written, [this] {
    const int64_t bytes = write_rank(plan_.target, plan_.snapshot, plan_.buffer_bytes);
    const std::lock_guard lock(mutex_);
    bytes_ = bytes;
  });
}

BackgroundSave::~BackgroundSave() {
  live_.give_up();
  if (thread_.joinable()) thread_.join();
}

/// The caller does the work when the system has no thread to give.
template <typename Work>
void BackgroundSave::run(SavePhase busy, SavePhase done, Work work) {
  if (thread_.joinable()) thread_.join();
  phase_ = busy;
  const auto perform = [this, done, work] {
    std::string failure;
    try {
      work();
    } catch (const std::exception& error) {
      failure = *error.what() ? error.what() : "writing the checkpoint";
    }
    live_.release();
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    phase_ = failure_.empty() ? done : SavePhase::failed;
    end_ = steady_clock::now();
    changed_.notify_all();
  };
  thread_ = start_thread(perform);
  if (!thread_.joinable()) perform();
}

SavePhase BackgroundSave::phase() const {
  const std::lock_guard lock(mutex_);
  return phase_;
}

std::string BackgroundSave::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

int64_t BackgroundSave::written_bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

double BackgroundSave::seconds() const {
  const std::lock_guard lock(mutex_);
  return std::chrono::duration<double>(end_ - start_).count();
}

void BackgroundSave::commit() {
  run(SavePhase::committing, SavePhase::committed, [this] {
    checkpoint::commit(plan_.target, plan_.manifest, plan_.save_latest);
    retain(plan_.target, plan_.retention);
  });
}

void BackgroundSave::wait_idle(const std::function<void()>& meanwhile) const {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kInterruptPeriod, [&] { return !is_busy(phase_); })) {
    lock.unlock();
    meanwhile();
    lock.lock();
  }
}

bool wait_for_tables(const SaveTarget& target, int world_size, const std::function<bool()>& is_hopeless) {
  constexpr std::chrono::seconds kLongestPause{60};
  const std::string growing = growing_path(target);
  int64_t bytes = -1;
  auto changed_at = steady_clock::now();
  for (int rank = 0; rank < world_size;) {
    if (exists(growing + "/" + rank_table_name(rank))) {
      ++rank;
      continue;
    }
    if (is_hopeless() && !exists(growing + "/" + rank_table_name(rank))) return false;
    int64_t now = bytes_in(growing);
    for (const std::string& folder : target.folders) now += bytes_in(growing_parts(target, folder));
    if (now != bytes) {
      bytes = now;
      changed_at = steady_clock::now();
    }
    if (steady_clock::now() - changed_at > kLongestPause) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

}  // namespace deeptide::checkpoint
