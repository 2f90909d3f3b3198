// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The launcher's end of the links to ranks that mpirun or srun started; to the hang watch each is a host of one rank.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launch/plan/hostfile.h"
#include "launch/system/poll_set.h"
#include "launch/watch/hang_watch.h"
#include "launch/wire/messages.h"
#include "launch/wire/token_link.h"

namespace deeptide::launch {

/// Tells `deeptide rank` where the hub is: a port, then addresses to try in turn, separated by commas.
constexpr const char* kHubVariable = "DEEPTIDE_HUB";

/// Optional: if it cannot listen, or a rank cannot connect, that rank reports by itself.
class RankHub {
 public:
  /// `hosts`: the hostfile's, whose names are the ones that the user knows.
  explicit RankHub(std::vector<Host> hosts);
  ~RankHub();
  RankHub(const RankHub&) = delete;
  RankHub& operator=(const RankHub&) = delete;

  /// Value of kHubVariable; empty: it does not listen.
  const std::string& address() const { return address_; }
  /// Adds ranks that know `token` to `watch` as they connect. This hub outlives the watch.
  void serve(const std::string& token, HangWatch& watch);
  void add_to(PollSet& set);
  /// Call after the poll set has woken.
  void check();

 private:
  struct Guest {
    std::unique_ptr<TokenLink> link;
    std::optional<size_t> number;  // in the watch, since its hello
  };

  void accept_one();
  void on_frame(Guest& guest, const Frame& frame);
  void on_hello(Guest& guest, const RankHello& hello);
  std::string name_of(const RankHello& hello) const;

  std::vector<Host> hosts_;
  std::string address_, token_;
  HangWatch* watch_ = nullptr;
  int listener_ = -1;
  size_t max_guests_;                 // descriptors are left for other things
  Clock::time_point closed_until_{};  // the door: accepting failed
  std::vector<std::unique_ptr<Guest>> guests_;
  std::set<int> ranks_;  // that have sent their hello
  int world_size_ = 0;   // as the first of them reported
};

}  // namespace deeptide::launch
