// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Says what the links between hosts have carried, which is slow, and who is late.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "comm/messages.h"
#include "engine/bind/channels.h"

namespace deeptide::engine {

class LinkReport {
 public:
  /// Collective where ranks are on several hosts: exchanges the hosts' names.
  explicit LinkReport(Channels& channels);

  /// The facts that this rank tells the others in a step's exchange of verdicts.
  comm::LinkFacts own_facts();
  /// After that exchange.
  void note(const std::vector<comm::Verdict>& verdicts);
  /// "links: rank 0 has sent 46.0 MiB to rank 1; slow from rank 1 on b to rank 0 on a, …"; empty on one host, and
  /// before the first step.
  std::string text() const;
  /// "from rank 1 on b to rank 0 on a, 11.2 MiB/s (others 100 MiB/s)"; empty if no link is slow.
  std::string slow_text() const;

 private:
  std::string rank_text(int rank) const;
  std::string rank_at(size_t index) const;
  std::string volume_text() const;
  std::string late_text() const;

  Channels& channels_;
  std::vector<std::string> names_;      // of each rank's host; empty: all ranks are on one
  std::vector<comm::LinkFacts> facts_;  // by the team's index, as of the last step
  int64_t num_steps_ = 0;
  std::chrono::steady_clock::time_point begin_;  // of the steps that count: the first one also prepares
  double waited_s_ = 0.0;                        // until then
  double step_s_ = 0.0;                          // a step takes so long
};

}  // namespace deeptide::engine
