// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Streams: a queue and a thread each. Clocks and simulated time advance when a task is enqueued.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "simulated/machine/machine.h"

namespace deeptide::simulated {

Machine::Stream& Machine::stream(int index) {
  while (static_cast<int>(streams_.size()) <= index) {
    streams_.emplace_back();
    std::thread(&Machine::work, this, static_cast<int>(streams_.size()) - 1).detach();
  }
  return streams_[static_cast<size_t>(index)];
}

int Machine::take_stream() {
  stream(0);  // the default stream
  auto index = static_cast<int>(streams_.size());
  if (!free_streams_.empty()) {
    index = free_streams_.back();
    free_streams_.pop_back();
  }
  stream(index);
  return index;
}

int Machine::new_stream() {
  Lock lock(mutex_);
  return take_stream();
}

void Machine::free_stream(int index) noexcept {
  Lock lock(mutex_);
  free_streams_.push_back(index);
}

int Machine::pool_stream() {
  constexpr size_t kPool = 16;
  Lock lock(mutex_);
  if (pool_.size() < kPool) pool_.push_back(take_stream());
  return pool_[next_of_pool_++ % kPool];
}

bool Machine::may_run(int index, const Stream& stream) const {
  const bool late = settings_.schedule == Schedule::late ||
                    (settings_.schedule == Schedule::late_default && index == 0) ||
                    (settings_.schedule == Schedule::late_others && index != 0);
  return !stream.queue.empty() && (!late || stream.done < stream.target) && is_next(index, stream.queue.front().tick);
}

/// Whether nothing that was issued before to the same connection has yet to begin. Records pass: they are written by
/// what they follow.
bool Machine::is_next(int index, uint64_t tick) const {
  if (connections_.empty()) return true;
  const auto& waiting = connections_[static_cast<size_t>(index) % connections_.size()];
  return waiting.empty() || waiting.front() == std::pair(index, tick) ||
         std::none_of(waiting.begin(), waiting.end(), [&](const auto& one) { return one == std::pair(index, tick); });
}

/// The stream's next task begins.
void Machine::leave_connection(int index) {
  if (connections_.empty()) return;
  auto& waiting = connections_[static_cast<size_t>(index) % connections_.size()];
  if (!waiting.empty() && waiting.front().first == index) waiting.pop_front();
  changed_.notify_all();
}

void Machine::work(int index) {
  Lock lock(mutex_);
  Stream& own = streams_[static_cast<size_t>(index)];
  for (;;) {
    const auto ready = [&] { return may_run(index, own); };
    changed_.wait(lock, [&] { return !own.queue.empty(); });
    if (settings_.patience_ms == 0) {
      changed_.wait(lock, ready);
    } else if (!changed_.wait_for(lock, std::chrono::milliseconds(settings_.patience_ms), ready)) {
      aim(index, own.issued);
      continue;
    }
    run_front(lock, index, own);
  }
}

void Machine::run_front(Lock& lock, int index, Stream& own) {
  Queued task = std::move(own.queue.front());
  own.queue.pop_front();
  if (task.after.stream >= 0) {
    const Stream& other = streams_[static_cast<size_t>(task.after.stream)];
    aim(task.after.stream, task.after.tick);
    changed_.wait(lock, [&] { return other.done >= task.after.tick; });
    leave_connection(index);
  } else {
    if (task.is_work) leave_connection(index);
    constexpr uint64_t kPauses = 8;  // one task in so many: a busy machine takes milliseconds to wake a thread
    const bool pauses =
        settings_.schedule == Schedule::random && settings_.max_delay_us > 0 && random_() % kPauses == 0;
    const unsigned pause = pauses ? static_cast<unsigned>(random_() % settings_.max_delay_us) : 0;
    const bool runs = !own.failure && task.run;
    lock.unlock();
    if (pause > 0) ::usleep(pause);
    std::exception_ptr failure;
    try {
      if (runs) task.run();
    } catch (...) {
      failure = std::current_exception();
    }
    task.run = nullptr;  // what it holds goes before the task counts as done
    task.keep.clear();
    lock.lock();
    if (failure && !own.failure) own.failure = failure;
  }
  own.done = task.tick;
  changed_.notify_all();
}

uint64_t Machine::push(int index, Queued queued) {
  Stream& s = stream(index);
  queued.tick = ++s.issued;
  join(s.clock, host_);
  if (s.clock.size() <= static_cast<size_t>(index)) s.clock.resize(static_cast<size_t>(index) + 1);
  s.clock[static_cast<size_t>(index)] = s.issued;
  const bool connects = !connections_.empty() && (queued.is_work || queued.after.stream >= 0);
  if (connects) connections_[static_cast<size_t>(index) % connections_.size()].emplace_back(index, s.issued);
  s.queue.push_back(std::move(queued));
  changed_.notify_all();
  return s.issued;
}

/// Lets the stream's tasks up to `tick` begin under every schedule, and what keeps them from beginning.
void Machine::aim(int index, uint64_t tick) {
  Stream& own = stream(index);
  own.target = std::max(own.target, tick);
  changed_.notify_all();
  if (connections_.empty()) return;
  const auto& waiting = connections_[static_cast<size_t>(index) % connections_.size()];
  const auto last = std::find_if(waiting.rbegin(), waiting.rend(),
                                 [&](const auto& one) { return one.first == index && one.second <= tick; });
  for (auto one = last; one != waiting.rend(); ++one) {
    Stream& before = stream(one->first);
    before.target = std::max(before.target, one->second);
  }
}

void Machine::await(Lock& lock, int index, uint64_t tick) {
  const Stream& s = stream(index);
  aim(index, tick);
  changed_.wait(lock, [&] { return s.done >= tick; });
}

void Machine::await_all(Lock& lock) {
  for (size_t i = 0; i < streams_.size(); ++i) await(lock, static_cast<int>(i), streams_[i].issued);
}

void Machine::host_learns(const Clock& clock, double time_s, const std::string& from) {
  join(host_, clock);
  timeline_.host_wait(time_s);
  if (!from.empty()) host_waits_.push_back(from);
  if (!settings_.guard_pinned) return;
  for (auto& [address, weak] : blocks_) {
    const BlockRef block = weak.lock();
    if (!block || !block->guarded()) continue;
    forget_done(*block, host_);
    block->guard();
  }
}

void Machine::check_uses(const Task& task, int index) {
  Stream& s = stream(index);
  Clock now = s.clock;
  join(now, host_);
  if (now.size() <= static_cast<size_t>(index)) now.resize(static_cast<size_t>(index) + 1);
  now[static_cast<size_t>(index)] = s.issued + 1;
  for (const Use& use : task.uses) {
    ++stats_.checked;
    if (auto text = conflict(use, task.name, index, now)) found(std::move(*text));
  }
}

void Machine::note_uses(const Task& task, int index) {
  const uint64_t tick = stream(index).issued + 1;
  for (const bool write : {false, true}) {  // a write implies this task's own reads
    for (const Use& use : task.uses) {
      if (use.write != write) continue;
      forget_done(*use.block, host_);
      note(use, task.name, index, tick);
      if (use.block->kind == Kind::pinned && settings_.guard_pinned) use.block->guard();
    }
  }
}

void Machine::enqueue(int index, Task task, HostWait wait) {
  Lock lock(mutex_);
  Stream& s = stream(index);
  throw_pending(&s);
  if (settings_.check) {
    check_uses(task, index);
    note_uses(task, index);
  }
  Queued queued;
  queued.is_work = true;
  queued.run = std::move(task.run);
  for (Use& use : task.uses) queued.keep.push_back(std::move(use.block));
  task.uses.clear();
  const double end = timeline_.add(index, task.cost);
  ++stats_.tasks;
  Traffic& traffic = traffic_[task.name];
  ++traffic.tasks;
  traffic.bytes += static_cast<int64_t>(task.cost.bytes);
  const uint64_t tick = push(index, std::move(queued));
  if (wait == HostWait::no && settings_.schedule != Schedule::at_once) return;
  const Clock known = s.clock;
  await(lock, index, tick);
  if (wait == HostWait::ordered) host_learns(known, end, task.name);
  if (wait == HostWait::blocked) {
    timeline_.host_wait(end);
    host_waits_.push_back(task.name);
  }
  throw_pending(&s);
}

void Machine::record(Event& event, int index) {
  Lock lock(mutex_);
  event.tick = push(index, {});
  event.stream = index;
  event.clock = stream(index).clock;
  event.time_s = timeline_.end_of(index);
}

void Machine::wait(const Event& event, int index) {
  if (event.stream < 0) return;
  Lock lock(mutex_);
  Queued queued;
  queued.after = event;
  push(index, std::move(queued));
  join(stream(index).clock, event.clock);
  timeline_.wait(index, event.time_s);
}

void Machine::start(const Event& event) {
  Lock lock(mutex_);
  aim(event.stream, event.tick);
}

bool Machine::query(const Event& event) {
  if (event.stream < 0) return true;
  Lock lock(mutex_);
  const Stream& s = stream(event.stream);
  aim(event.stream, event.tick);  // who polls makes progress under every schedule
  if (s.done < event.tick) return false;
  host_learns(event.clock, event.time_s, "");
  return true;
}

void Machine::synchronize(const Event& event) {
  if (event.stream < 0) return;
  Lock lock(mutex_);
  await(lock, event.stream, event.tick);
  host_learns(event.clock, event.time_s, "event synchronize");
  throw_pending(&stream(event.stream));
}

bool Machine::query_stream(int index) {
  Lock lock(mutex_);
  const Stream& s = stream(index);
  aim(index, s.issued);
  if (s.done < s.issued) return false;
  host_learns(s.clock, timeline_.end_of(index), "");
  return true;
}

void Machine::synchronize_stream(int index) {
  Lock lock(mutex_);
  Stream& s = stream(index);
  const Clock known = s.clock;
  const double end = timeline_.end_of(index);
  await(lock, index, s.issued);
  host_learns(known, end, "stream synchronize");
  throw_pending(&s);
}

void Machine::synchronize() {
  Lock lock(mutex_);
  std::vector<uint64_t> issued;
  for (const Stream& s : streams_) issued.push_back(s.issued);
  for (size_t i = 0; i < issued.size(); ++i) {
    const Clock known = streams_[i].clock;
    const double end = timeline_.end_of(static_cast<int>(i));
    await(lock, static_cast<int>(i), issued[i]);
    host_learns(known, end, i == 0 ? "device synchronize" : "");
    throw_pending(&streams_[i]);
  }
}

}  // namespace deeptide::simulated
