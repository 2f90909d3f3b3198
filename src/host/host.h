// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which ranks share this machine, and the small shared memory over which they signal each other.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deeptide/world.h"
#include "device/memory/shared_memory.h"
#include "host/process_watch.h"

namespace deeptide::world {
class FailureBoard;
}  // namespace deeptide::world

namespace deeptide::host {

/// The ranks of a world by host: ranks of one host share kernel, network namespace and user. All ranks agree on it.
class Host {
 public:
  /// Collective over the world, through its store. `prefix`: for keys, equal on all ranks. `enabled`: false on one rank
  /// makes each rank its own host. Errors, also of `share`: CommError if ranks do not arrive within the store's
  /// timeout, or soon after a rank of this host has ended or one has reported to `board` that it cannot continue.
  /// `numbers`: what errors and the board call the ranks, where the world is a part of a job; empty: as the world does.
  static std::shared_ptr<Host> find(const World& world, const std::string& prefix, bool enabled,
                                    std::shared_ptr<world::FailureBoard> board = nullptr,
                                    std::vector<int> numbers = {});
  ~Host();

  /// This host's ranks, ascending, and this rank's index among them.
  const std::vector<int>& ranks() const { return ranks_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  int index() const { return index_; }
  /// All ranks by host: [host][index]; hosts in the order of their first rank.
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  int host_index() const { return host_index_; }
  bool holds_all() const { return hosts_.size() == 1; }
  /// Whether all hosts have equally many ranks, so that collectives may go host by host.
  bool is_uniform() const;
  /// Whether, besides, ranks are numbered host by host.
  bool is_in_order() const;
  /// "1 host of 4 ranks, shared memory", "2 hosts of 2 ranks, shared memory within", "2 hosts of 3 and 1 ranks,
  /// network".
  std::string text() const;

  /// Returns the next `bytes` of the signal memory, zeroed. All ranks of the host call it in the same order. Touch them
  /// only after `take_pages`.
  char* reserve(int64_t bytes);
  /// Takes the pages of what `reserve` returned. Errors: RuntimeError if there is too little memory.
  void take_pages(const char* begin, int64_t bytes);
  /// Collective over the host: zeroed memory that its ranks share. Null on all ranks if one cannot map it or fails
  /// `check` (which throws then, and leaves the memory unchanged), with the reason in `why_not`.
  using Check = std::function<void(const std::shared_ptr<device::SharedMemory>&)>;
  std::shared_ptr<device::SharedMemory> share(int64_t bytes, std::string& why_not, const Check& check = {});
  /// Returns a rank of this host whose process has ended, "rank 1's process 4711 has ended"; empty while all live.
  std::optional<std::string> find_dead() const;
  /// The process of another rank of this machine, if it is alive.
  std::optional<int> find_process(int rank) const;
  /// The same of a rank that has not told the board of its end. Of several, the one that a rank of this host missed
  /// first, since others may have ended for its sake; all of them if nobody can tell any more. Works where ranks of one
  /// machine share no memory, too. For waits that have failed: asks the store.
  std::optional<std::string> find_killed() const;
  /// Whether each rank of the host has a core: then spinning before sleeping pays off.
  bool has_core_each() const { return core_each_; }

 private:
  Host(const World& world, std::string prefix, std::shared_ptr<world::FailureBoard> board, std::vector<int> numbers);
  int number(int rank) const { return numbers_.empty() ? rank : numbers_.at(static_cast<size_t>(rank)); }
  std::string await(const std::string& key) const;
  std::vector<std::string> gather_lines(const std::string& prefix, const std::string& own) const;
  /// Returns the reason of a failure, or an empty text.
  std::string connect();
  /// `pids`: of this machine's ranks, with their numbers.
  void watch_processes(const std::vector<std::pair<int, int>>& pids);

  World world_;
  std::string prefix_;
  std::shared_ptr<world::FailureBoard> board_;  // may be null
  std::vector<int> numbers_;                    // may be empty
  std::vector<std::vector<int>> hosts_;
  std::vector<int> ranks_;
  int host_index_ = 0;
  int index_ = 0;
  bool core_each_ = false;
  int num_shared_ = 0;
  struct Watched {
    int rank;  // its number
    ProcessWatch process;
  };
  std::string end_of(const Watched& watched) const;  // "rank 1's process 4711 has ended"
  std::vector<Watched> processes_;                   // of the ranks of this machine, ascending
  std::shared_ptr<device::SharedMemory> signals_;
  int64_t reserved_ = 0;
  std::atomic<int32_t>* first_killed_ = nullptr;  // shared by this host's ranks: the rank + 1, 0: none; may be null
};

}  // namespace deeptide::host
