// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The simulated accelerator without torch: memory, asynchronous streams and events, whose order it checks.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "simulated/machine/memory.h"
#include "simulated/machine/order.h"
#include "simulated/machine/timeline.h"

namespace deeptide::simulated {

/// When tasks run. None of them changes what the checker finds or the simulated time.
enum class Schedule : uint8_t {
  at_once,       // each task ends before enqueue returns
  random,        // at full speed, some after a random pause
  late,          // once the host, or a task that it waits for, needs it
  late_default,  // late on stream 0, at once on the others
  late_others,   // late on all streams but stream 0
};

/// Which collectives stay on the device until their backend is aborted: those that have lost a peer, which end in an
/// error otherwise, or all.
enum class Stuck : uint8_t { never, without_peer, always };

struct Settings {
  Schedule schedule = Schedule::random;
  unsigned max_delay_us = 0;
  /// How long late tasks are held back where nothing here needs them: another rank may, for which this host waits, and
  /// every real device goes on. 0: for ever.
  unsigned patience_ms = 0;
  uint64_t seed = 1;
  size_t cap_bytes = size_t{16} << 30;
  bool check = true;
  bool guard_pinned = false;
  Bandwidths bandwidths{};
  size_t workspace_bytes = 0;   // of matrix products, for each thread and stream; kept until it is 0 again
  bool warns_of_waits = false;  // torch's own warning for each wait of the host, as CUDA's debug mode gives it
  Stuck collectives = Stuck::never;
  /// Queues of the hardware that all streams share, in turn (CUDA_DEVICE_MAX_CONNECTIONS); 0: each has its own. What
  /// cannot begin keeps all that was issued behind it in its queue from beginning, of other streams too.
  unsigned connections = 0;
  bool pins_for_another = false;  // torch pins memory for another type of device, as where it finds a GPU beside this
  bool kernels = false;           // the kernels for GPUs are the device's too
  size_t staged_bytes =
      size_t{64} << 10;  // more of them from memory that is not pinned keep the host until they are read
};

struct Stats {
  size_t used_bytes = 0, peak_bytes = 0, cap_bytes = 0;
  size_t reserved_bytes = 0;  // in use, and freed but kept
  uint64_t tasks = 0, checked = 0;
  size_t streams = 0;  // that somebody has, or that the pool holds
};

struct Traffic {
  int64_t tasks = 0, bytes = 0;
};

/// A point in a stream, of its work and of simulated time.
struct Event {
  int stream = -1;  // never recorded
  uint64_t tick = 0;
  Clock clock;
  double time_s = 0;
};

enum class HostWait : uint8_t {
  no,
  done,     // only until the task is done: the order is not thereby known to the host
  blocked,  // likewise, but counted, and named by host_waits()
  ordered   // counted and named, and the host then knows the order
};

struct Task {
  std::string name;
  std::vector<Use> uses;
  std::function<void()> run;
  Cost cost;
};

/// One device per process. Thread-safe. All of the host's threads count as one: that one of them waited orders all.
/// Errors of order are those of the first violation; then the checker is silent until `settle`. Errors while memory is
/// freed are thrown by the next call.
class Machine {
 public:
  /// Never destroyed: its threads outlive main.
  static Machine& instance();

  void configure(const Settings& settings);
  /// Waits for all work, and makes the checker forget what it knows and found. Returns what it found, or "".
  std::string settle();
  Stats stats();
  void reset_peak();
  /// A caching allocator keeps what tensors free, until this.
  void empty_cache();
  /// The tasks and calls for which the host has waited, since the last call of this.
  std::vector<std::string> host_waits();
  /// The host has waited elsewhere than for a task, in `call`.
  void note_host_wait(const std::string& call);
  bool warns_of_waits();
  bool pins_for_another();
  bool has_kernels();
  size_t staged_bytes();
  /// Returns what was issued since the last call, by name: how many tasks, and the bytes that they read and write.
  std::map<std::string, Traffic> take_traffic();
  Stuck stuck_collectives();
  double host_time_s();
  /// The host computes for so long: what it issues later begins later.
  void host_works(double seconds);

  /// Errors: OutOfMemory beyond the cap, after waiting for freed memory.
  BlockRef allocate(Kind kind, size_t bytes, int stream);
  void release(BlockRef block) noexcept;
  /// Returns the block with this address, if any.
  BlockRef find(const void* address);
  void record_stream(const BlockRef& block, int stream);
  /// Takes the stream's workspace for this thread, if there is none yet and Settings ask for one.
  void take_workspace(int stream);
  /// Declares that the host accesses pinned memory by a plain pointer. Errors: OrderError.
  void host_access(const void* address, size_t bytes, bool write, const std::string& who);

  /// One of a pool that all share, in turn, as a GPU's are.
  int pool_stream();
  /// One of the caller's own. What is freed serves the next caller, behind the work that is left in it.
  int new_stream();
  void free_stream(int index) noexcept;
  /// Errors: OrderError; what an earlier task of the stream threw.
  void enqueue(int stream, Task task, HostWait wait = HostWait::no);
  void record(Event& event, int stream);
  void wait(const Event& event, int stream);
  bool query(const Event& event);
  /// The work before the event begins under every schedule, though nothing waits for it yet.
  void start(const Event& event);
  void synchronize(const Event& event);
  bool query_stream(int stream);
  void synchronize_stream(int stream);
  void synchronize();

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Queued {
    uint64_t tick = 0;
    std::function<void()> run;
    std::vector<BlockRef> keep;
    Event after;           // of a wait
    bool is_work = false;  // a task, neither a wait nor a record
  };
  struct Stream {
    std::deque<Queued> queue;
    uint64_t issued = 0, done = 0, target = 0;
    Clock clock;
    std::exception_ptr failure;
  };

  Machine() = default;
  Stream& stream(int index);
  int take_stream();
  void work(int index);
  void run_front(Lock& lock, int index, Stream& stream);
  bool may_run(int index, const Stream& stream) const;
  uint64_t push(int index, Queued queued);
  void aim(int index, uint64_t tick);
  void await(Lock& lock, int index, uint64_t tick);
  void await_all(Lock& lock);
  bool is_next(int index, uint64_t tick) const;
  void leave_connection(int index);
  void host_learns(const Clock& clock, double time_s, const std::string& from);
  void check_uses(const Task& task, int index);
  void note_uses(const Task& task, int index);
  void found(std::string text);
  void throw_pending(Stream* stream = nullptr);
  void sweep(bool all);
  void make_room(Lock& lock, size_t room, size_t bytes);
  void take_bytes(size_t room);
  void give_bytes(size_t room);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Stream> streams_;                                     // addresses stay
  std::vector<std::deque<std::pair<int, uint64_t>>> connections_;  // streams' tasks that have not begun, as issued
  std::vector<int> pool_, free_streams_;
  size_t next_of_pool_ = 0;
  Settings settings_;
  std::mt19937_64 random_{1};
  Timeline timeline_;
  Clock host_;  // what the host knows to be done
  std::map<const char*, std::weak_ptr<Block>> blocks_;
  std::vector<BlockRef> deferred_;  // freed, but a recorded stream may still use them
  std::string finding_;             // the first; silences the checker
  bool thrown_ = false;             // the finding
  std::vector<std::string> host_waits_;
  std::map<std::string, Traffic> traffic_;
  std::map<std::pair<std::thread::id, int>, BlockRef> workspaces_;
  std::multiset<size_t> cached_;  // what was freed, in the pieces in which it was taken; pieces do not grow together
  Stats stats_;
};

}  // namespace deeptide::simulated
