// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Counts what a rank exchanges with each other rank over the network, and how fast it comes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

namespace deeptide::comm {

/// A rank's view of its links over the network, and of itself.
struct LinkFacts {
  int32_t slow_from = -1;       // the world's rank at the other end of the slowest link towards this rank; -1: none is
                                // known well enough to be blamed
  float rate = 0.0f;            // of the slowest link, in bytes/s; 0: none is known
  float rate_of_others = 0.0f;  // the median of this rank's other links; 0: none is known
  float computing_s = 0.0f;     // per step: the time in which it did not wait for others
};

/// One link: what passed between this rank and another.
struct LinkUse {
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
};

/// The links of one engine's channels, by the other's rank in the world. Thread-safe.
class LinkTimes {
 public:
  /// `near`: the ranks of this host, with whom nothing is counted.
  explicit LinkTimes(std::vector<int> near = {}) : near_(near.begin(), near.end()) {}

  void add_sent(int to, int64_t bytes);
  void add_received(int from, int64_t bytes);
  /// `bytes` came within `seconds` of the bytes before them, which were sent without a pause between.
  void add_sample(int from, int64_t bytes, double seconds);

  std::map<int, LinkUse> uses() const;
  int64_t sent_bytes() const;
  /// The facts that ranks compare, but for the time of computing.
  LinkFacts facts() const;

 private:
  struct Sample {
    double bytes;
    double seconds;
  };
  /// The newest.
  struct Samples {
    std::vector<Sample> ring;
    size_t next = 0;
  };

  static Sample upper_of(std::vector<Sample> samples);

  const std::set<int> near_;
  mutable std::mutex mutex_;
  std::map<int, LinkUse> uses_;
  std::map<int, Samples> samples_;
};

/// The link that is slower than the others, by the receiver's place among the ranks that told `facts`.
struct SlowLink {
  size_t to;
  double others;  // their median, in bytes/s
};
/// Nothing if links are even, or too little is known.
std::optional<SlowLink> find_slow_link(const std::vector<LinkFacts>& facts);

/// The rank that computes for longer than the others, by its place.
struct LateRank {
  size_t rank;
  double others_s;  // their median, per step
};
/// Nothing if the others wait for it for less than a tenth of `step_s`, how long a step takes.
std::optional<LateRank> find_late_rank(const std::vector<LinkFacts>& facts, double step_s);

}  // namespace deeptide::comm
