// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Memory, settings and what the checker found.
#include "simulated/machine/machine.h"

#include <algorithm>
#include <utility>

namespace deeptide::simulated {

Machine& Machine::instance() {
  static Machine& machine = *new Machine();
  return machine;
}

void Machine::configure(const Settings& settings) {
  std::map<std::pair<std::thread::id, int>, BlockRef> unwanted;
  Lock lock(mutex_);
  if (settings.workspace_bytes == 0) unwanted = std::exchange(workspaces_, {});
  if (settings.connections != settings_.connections) await_all(lock);
  settings_ = settings;
  connections_.resize(settings.connections);
  timeline_.set_connections(settings.connections);
  random_.seed(settings.seed);
  timeline_.set_bandwidths(settings.bandwidths);
  changed_.notify_all();
  lock.unlock();
  for (auto& [owner, block] : unwanted) release(std::move(block));
}

std::string Machine::settle() {
  Lock lock(mutex_);
  await_all(lock);
  for (Stream& s : streams_) {
    join(host_, s.clock);
    s.failure = nullptr;
  }
  for (auto& [address, weak] : blocks_) {
    const BlockRef block = weak.lock();
    if (!block) continue;
    forget_done(*block, host_);
    if (block->guarded()) block->guard();
  }
  sweep(/*all=*/true);
  thrown_ = false;
  return std::exchange(finding_, {});
}

Stats Machine::stats() {
  Lock lock(mutex_);
  stats_.cap_bytes = settings_.cap_bytes;
  stats_.streams = streams_.size() - free_streams_.size();
  return stats_;
}

void Machine::empty_cache() {
  Lock lock(mutex_);
  cached_.clear();
  stats_.reserved_bytes = stats_.used_bytes;
}

void Machine::note_host_wait(const std::string& call) {
  Lock lock(mutex_);
  host_waits_.push_back(call);
}

bool Machine::warns_of_waits() {
  Lock lock(mutex_);
  return settings_.warns_of_waits;
}

bool Machine::pins_for_another() {
  Lock lock(mutex_);
  return settings_.pins_for_another;
}

bool Machine::has_kernels() {
  Lock lock(mutex_);
  return settings_.kernels;
}

std::map<std::string, Traffic> Machine::take_traffic() {
  Lock lock(mutex_);
  return std::exchange(traffic_, {});
}

size_t Machine::staged_bytes() {
  Lock lock(mutex_);
  return settings_.staged_bytes;
}

Stuck Machine::stuck_collectives() {
  Lock lock(mutex_);
  return settings_.collectives;
}

void Machine::take_workspace(int index) {
  const auto owner = std::pair(std::this_thread::get_id(), index);
  size_t bytes = 0;
  {
    Lock lock(mutex_);
    if (settings_.workspace_bytes == 0 || workspaces_.contains(owner)) return;
    bytes = settings_.workspace_bytes;
  }
  BlockRef block = allocate(Kind::device, bytes, index);
  Lock lock(mutex_);
  workspaces_[owner] = std::move(block);
}

void Machine::reset_peak() {
  Lock lock(mutex_);
  stats_.peak_bytes = stats_.used_bytes;
}

std::vector<std::string> Machine::host_waits() {
  Lock lock(mutex_);
  return std::exchange(host_waits_, {});
}

void Machine::host_works(double seconds) {
  Lock lock(mutex_);
  timeline_.host_wait(timeline_.host() + seconds);
}

double Machine::host_time_s() {
  Lock lock(mutex_);
  return timeline_.host();
}

BlockRef Machine::allocate(Kind kind, size_t bytes, int index) {
  Lock lock(mutex_);
  Stream& home = stream(index);
  throw_pending();
  if (kind != Kind::device) {
    auto block = std::make_shared<Block>(kind, bytes, index);
    blocks_[block->shown] = block;
    return block;
  }
  sweep(/*all=*/false);
  auto block = std::make_shared<Block>(kind, bytes, index);
  make_room(lock, block->room, bytes);
  take_bytes(block->room);
  // The addresses may have belonged to earlier work of the home stream, so other streams must come after it.
  if (home.issued > 0) block->accesses.push_back({0, bytes, true, index, home.issued, "allocation"});
  blocks_[block->shown] = block;
  return block;
}

/// Out of the smallest piece that has room for it, or out of new memory.
void Machine::take_bytes(size_t room) {
  stats_.used_bytes += room;
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.used_bytes);
  const auto piece = cached_.lower_bound(room);
  if (piece == cached_.end()) {
    stats_.reserved_bytes += room;
    return;
  }
  const size_t rest = *piece - room;
  cached_.erase(piece);
  if (rest > 0) cached_.insert(rest);
}

void Machine::give_bytes(size_t room) {
  stats_.used_bytes -= room;
  cached_.insert(room);
}

/// Makes room like a caching allocator: waits for what is freed, then fails.
void Machine::make_room(Lock& lock, size_t room, size_t bytes) {
  if (stats_.used_bytes + room <= settings_.cap_bytes) return;
  await_all(lock);
  sweep(/*all=*/true);
  if (stats_.used_bytes + room <= settings_.cap_bytes) return;
  throw OutOfMemory("simulated device out of memory: tried to allocate " + std::to_string(bytes) + " bytes; " +
                    std::to_string(stats_.used_bytes) + " of " + std::to_string(settings_.cap_bytes) +
                    " bytes are in use");
}

void Machine::release(BlockRef block) noexcept {
  Lock lock(mutex_);
  blocks_.erase(block->shown);
  if (block->kind != Kind::device) return;  // tasks hold it, as a host allocator's events do
  bool pending = false;
  if (settings_.check && finding_.empty()) {
    if (auto text = free_conflict(*block, stream(block->home).clock, host_, pending)) finding_ = std::move(*text);
  }
  if (pending) {
    deferred_.push_back(std::move(block));
  } else {
    give_bytes(block->room);
  }
}

/// Gives back what was freed and is no longer in use by a stream that it was recorded on.
void Machine::sweep(bool all) {
  std::erase_if(deferred_, [&](const BlockRef& block) {
    bool pending = false;
    if (!all) free_conflict(*block, streams_[static_cast<size_t>(block->home)].clock, host_, pending);
    if (!pending) give_bytes(block->room);
    return !pending;
  });
}

BlockRef Machine::find(const void* address) {
  const auto* shown = static_cast<const char*>(address);
  Lock lock(mutex_);
  auto next = blocks_.upper_bound(shown);
  if (next == blocks_.begin()) return nullptr;
  BlockRef block = std::prev(next)->second.lock();
  return block && shown < block->shown + block->room ? block : nullptr;
}

void Machine::record_stream(const BlockRef& block, int index) {
  Lock lock(mutex_);
  block->recorded.insert(index);
}

void Machine::host_access(const void* address, size_t bytes, bool write, const std::string& who) {
  const BlockRef block = find(address);
  if (!block || bytes == 0) return;
  Lock lock(mutex_);
  const auto begin = static_cast<size_t>(static_cast<const char*>(address) - block->shown);
  if (auto text = host_conflict({block, begin, begin + bytes, write}, who, host_)) found(std::move(*text));
}

/// Throws the first finding. Later ones are its consequences: what a stack that unwinds frees, for example.
void Machine::found(std::string text) {
  if (!settings_.check || !finding_.empty()) return;
  finding_ = std::move(text);
  thrown_ = true;
  throw OrderError(finding_);
}

void Machine::throw_pending(Stream* stream) {
  if (!finding_.empty() && !thrown_) {
    thrown_ = true;
    throw OrderError(finding_);
  }
  if (stream != nullptr && stream->failure) std::rethrow_exception(std::exchange(stream->failure, nullptr));
}

}  // namespace deeptide::simulated
