// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Compares the ranks' words.
#include "sharding/round_words.h"

#include <algorithm>
#include <variant>

namespace deeptide::sharding {

using comm::Close;
using comm::Wishes;
using comm::Word;

namespace {

/// Returns what a rank needs and would like; empty once the rank has closed.
const Wishes& wishes_of(const Word& word) {
  static const Wishes kNone;
  const auto* wishes = std::get_if<Wishes>(&word);
  return wishes ? *wishes : kNone;
}

bool mentions(const Wishes& wishes, int unit) {
  const auto all = wishes.all();
  return std::find(all.begin(), all.end(), unit) != all.end();
}

}  // namespace

int32_t writes_of(const Word& word) {
  return std::visit([](const auto& message) { return message.writes; }, word);
}

bool wrote_alike(const std::vector<Word>& words) {
  return std::all_of(words.begin(), words.end(),
                     [&](const Word& word) { return writes_of(word) == writes_of(words.front()); });
}

std::vector<std::pair<int, bool>> agree(const std::vector<Word>& words, int own_index) {
  std::vector<std::pair<int, bool>> order;  // unit, wanted here
  const auto known = [&](int unit) {
    return std::any_of(order.begin(), order.end(), [&](const auto& o) { return o.first == unit; });
  };
  for (const Word& word : words) {
    for (const int unit : wishes_of(word).needs()) {
      if (!known(unit)) order.emplace_back(unit, mentions(wishes_of(words[own_index]), unit));
    }
  }
  for (const int unit : wishes_of(words.front()).wishes()) {
    const bool all =
        std::all_of(words.begin(), words.end(), [&](const Word& word) { return mentions(wishes_of(word), unit); });
    if (all && !known(unit)) order.emplace_back(unit, true);
  }
  return order;
}

std::vector<int> agree_ahead(const std::vector<Close>& closes) {
  std::vector<int> agreed;
  for (const int unit : closes.front().ahead()) {
    const auto expects = [&](const Close& close) {
      return std::find(close.ahead().begin(), close.ahead().end(), unit) != close.ahead().end();
    };
    if (std::all_of(closes.begin(), closes.end(), expects)) agreed.push_back(unit);
  }
  return agreed;
}

}  // namespace deeptide::sharding
