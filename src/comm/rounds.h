// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rounds in which every rank states what it needs next, how far its reductions are, and learns the same of the others;
// between rounds, votes. They keep divergent ranks from hanging.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/group.h"
#include "comm/messages.h"

namespace deeptide::comm {

/// Runs rounds over a team on a channel of their own. One round is under way, or two where a rank has told something in
/// the meantime that cannot wait. A rank that has posted its word may continue computing and collect the round later.
/// Every rank takes part in every round, so all ranks share one sequence of rounds. Those who gather, those who reduce
/// and those who vote are clients side by side: each tells its part, and none is called from here. Thread-safe.
class Rounds {
 public:
  explicit Rounds(Group& control);

  int size() const { return control_.size(); }
  /// From now on every rank's wishes are taken to be this rank's own, and are not sent: all run one program. So no host
  /// waits for another's between two closes, which are rounds still.
  void take_wishes_as_alike() { alike_ = true; }
  bool are_wishes_alike() const { return alike_; }

  // Rounds.
  bool posted() const;
  bool ready() const;
  /// Posts this rank's word, with what is known of its reductions.
  void post(Word word);
  /// Posts a further word behind those under way: a rank may wait for what it tells, and post none before.
  void post_behind(Word word);
  /// Waits at most about `limit` for the first posted round. Returns one word per rank, in the team's order; none if
  /// the round is not there yet. Errors: as Group::wait, counted from the first call of the round.
  std::optional<std::vector<Word>> collect_for(std::chrono::milliseconds limit, const Site& site);
  /// Waits for the posted round. Errors: as Group::wait.
  std::vector<Word> collect(const Site& site);
  int64_t count() const { return count_; }

  // Reductions.
  /// Tells, in the next word, that this rank has begun so many rounds of reductions and waits for the others'.
  void announce(int64_t reductions) { announced_ = reductions; }
  /// Whether no word has told yet what was announced last.
  bool is_untold() const { return announced_ > 0; }
  /// The most that a rank has announced in the last round.
  int64_t most_announced() const { return most_announced_; }
  /// For devices, whose work may wait for other ranks: how many reductions this rank has launched, and for how many of
  /// them work that it issues from now on may wait.
  void note_reductions(int64_t launched, int64_t awaited) {
    launched_ = launched;
    awaited_ = awaited;
  }
  int64_t launched() const { return launched_; }
  int64_t awaited() const { return awaited_; }
  /// The reductions that all ranks have launched, as far as this rank knows from the last round.
  int64_t launched_by_all() const { return alike_ ? launched_ : launched_by_all_; }

  // Votes: collective, between rounds.
  /// Every rank receives every rank's bytes, equally many, in the team's order.
  void exchange_bytes(const void* own, void* all, size_t bytes, const Site& site);
  /// Every rank receives every rank's message, in the team's order.
  template <typename Message>
  std::vector<Message> exchange(const Message& own, const Site& site) {
    return exchange_all(std::span<const Message>(&own, 1), site);
  }
  /// Every rank receives every rank's values, equally many, one rank after the other.
  template <typename Value>
  std::vector<Value> exchange_all(std::span<const Value> own, const Site& site) {
    static_assert(std::is_trivially_copyable_v<Value>);
    std::vector<Value> all(own.size() * static_cast<size_t>(size()));
    exchange_bytes(own.data(), all.data(), own.size_bytes(), site);
    return all;
  }

 private:
  /// Words of all ranks, and this rank's.
  struct Round {
    at::Tensor out, in;
    Pending pending = {};
    bool is_own = false;  // nothing was sent
  };
  void start(Word word);
  std::vector<Word> words(const Round& round);

  Group& control_;
  bool alike_ = false;
  mutable std::mutex mutex_;
  std::deque<Round> posted_;  // in their order
  std::optional<Wait> wait_;  // for the first of them; nothing: nobody has waited yet
  Round spare_;               // the last one's memory
  std::string left_;          // of a vote that ended in an error here, and that others may complete yet; empty: none
  std::atomic<int64_t> count_{0};
  std::atomic<int64_t> announced_{0}, most_announced_{0};
  std::atomic<int64_t> launched_{0}, awaited_{0}, launched_by_all_{0};
};

}  // namespace deeptide::comm
