// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Links the launcher to ranks that mpirun or srun started; the hang watch sees each as a host with one rank.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/plan/hostfile.h"
#include "launch/system/poll_set.h"
#include "launch/watch/hang_watch.h"
#include "launch/wire/messages.h"
#include "launch/wire/token_link.h"

namespace deeptide::launch {

/// Holds the hub's place for `deeptide rank`: a port, then addresses to try in turn, separated by commas.
inline constexpr const char* kHubVariable = "DEEPTIDE_HUB";

/// Optional: a rank reports its own waits if the hub cannot listen or the rank cannot connect.
class RankHub {
 public:
  /// `hosts`: the hosts of the hostfile, under the names that the user knows.
  explicit RankHub(std::vector<Host> hosts);
  ~RankHub();
  RankHub(const RankHub&) = delete;
  RankHub& operator=(const RankHub&) = delete;

  /// Returns the value of kHubVariable; empty: the hub does not listen.
  const std::string& address() const { return address_; }
  /// Adds ranks that know `token` to `watch` as they connect. The hub must outlive the watch.
  void serve(const std::string& token, HangWatch& watch);
  void add_to(PollSet& set);
  /// Call after the poll set has woken.
  void check();

 private:
  struct Guest {
    std::unique_ptr<TokenLink> link;
    std::optional<size_t> number;  // index in the watch, set by the hello
    int rank = -1;                 // of the hello
  };

  void accept_one();
  void on_frame(Guest& guest, const Frame& frame);
  void on_hello(Guest& guest, const RankHello& hello);
  void take_leave(Guest& guest);
  std::string name_of(const RankHello& hello) const;

  std::vector<Host> hosts_;
  std::string address_, token_;
  HangWatch* watch_ = nullptr;
  int listener_ = -1;
  size_t max_guests_;                 // leaves descriptors for other uses
  Clock::time_point closed_until_{};  // pause in accepting after a failure
  std::vector<std::unique_ptr<Guest>> guests_;
  int world_size_ = 0;  // reported by the first rank that said hello
};

}  // namespace deeptide::launch
