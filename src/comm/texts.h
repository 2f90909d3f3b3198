// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Exchanges texts of any length over votes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/group.h"

namespace deeptide::comm {

/// Collective over the team of `votes`, which exchange values as Rounds does. Every rank receives every rank's text, in
/// the team's order. Errors: as Group::wait.
template <typename Votes>
std::vector<std::string> exchange_texts(Votes& votes, const std::string& own, const Site& site) {
  const auto sizes = votes.exchange(static_cast<int64_t>(own.size()), site);
  const auto most = static_cast<size_t>(*std::max_element(sizes.begin(), sizes.end()));
  std::string padded = own;
  padded.resize(most);
  const auto all = votes.exchange_all(std::span<const char>(padded), site);
  std::vector<std::string> texts;
  for (size_t i = 0; i < sizes.size(); ++i) texts.emplace_back(all.data() + i * most, static_cast<size_t>(sizes[i]));
  return texts;
}

}  // namespace deeptide::comm
