// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One rank's part of a save, in a thread beside training: writes the shard, then on rank 0 commits when asked to.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "checkpoint/format/manifest.h"
#include "checkpoint/format/retention.h"
#include "checkpoint/save/live_state.h"
#include "checkpoint/save/snapshot.h"
#include "checkpoint/save/writer.h"

namespace deeptide::checkpoint {

/// The contents and the place of a save; equal on all ranks but for `snapshot`.
struct SavePlan {
  SaveTarget target;
  Snapshot snapshot;
  Manifest manifest = {};
  bool save_latest = true;
  Retention retention = {};
  int64_t buffer_bytes = kBufferBytes;
};

/// How far this rank is. Later ones are larger, but `failed`.
enum class SavePhase : int32_t { none, writing, written, committing, committed, failed };

/// A forked child can only leave it: the thread that writes is its parent's.
class BackgroundSave {
 public:
  /// Starts to write. `most_kept_bytes`: of state that changes before it is written.
  BackgroundSave(SavePlan plan, int64_t most_kept_bytes);
  /// Waits for the thread.
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;

  SavePhase phase() const;
  /// Why it failed, naming the file; empty: it has not.
  std::string failure() const;
  /// On rank 0, once all ranks have written. Starts to commit.
  void commit();
  /// Waits until the thread has nothing to do. `meanwhile` is called now and then; what it throws passes through.
  void wait_idle(const std::function<void()>& meanwhile) const;

  LiveState& live() { return live_; }
  const SavePlan& plan() const { return plan_; }
  int64_t written_bytes() const;
  /// From the start to the end of the last thing that the thread did.
  double seconds() const;

 private:
  template <typename Work>
  void run(SavePhase busy, SavePhase done, Work work);

  SavePlan plan_;
  LiveState live_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  SavePhase phase_ = SavePhase::writing;
  std::string failure_;
  int64_t bytes_ = 0;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point end_ = start_;
  std::thread thread_;
};

/// On rank 0, where ranks can no longer agree: waits until the growing folder has the tables of all ranks, which they
/// write last. False: `is_hopeless`, or nothing in the folder has changed for a minute.
bool wait_for_tables(const SaveTarget& target, int world_size, const std::function<bool()>& is_hopeless);

}  // namespace deeptide::checkpoint
