// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Computes what every rank derives alike from the words of one round.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "comm/messages.h"

namespace deeptide::sharding {

int32_t writes_of(const comm::Word& word);
/// Whether all ranks have made equally many writes: then they have made the same ones.
bool wrote_alike(const std::vector<comm::Word>& words);
/// Lists the round's units in the order in which all ranks issue them: needs by rank, then what all ranks would like.
/// With each, whether the rank at `own_index` wants it.
std::vector<std::pair<int, bool>> agree(const std::vector<comm::Word>& words, int own_index);
/// Returns the units that all ranks expect to need first in the next pass, in the first rank's order.
std::vector<int> agree_ahead(const std::vector<comm::Close>& closes);

}  // namespace deeptide::sharding
