// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Multiplies in four lanes, so that one multiplication need not wait for another.
#include "base/digest.h"

#include <cstring>

namespace deeptide {

uint64_t digest_of_bytes(const void* bytes, size_t count) {
  constexpr uint64_t kPrime = 0x100000001b3U;
  constexpr size_t kLanes = 4, kWord = sizeof(uint64_t);
  const auto* from = static_cast<const unsigned char*>(bytes);
  uint64_t lanes[kLanes] = {1, 2, 3, 4};
  size_t at = 0;
  for (; at + kLanes * kWord <= count; at += kLanes * kWord) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      uint64_t word = 0;
      std::memcpy(&word, from + at + lane * kWord, kWord);
      lanes[lane] = (lanes[lane] ^ word) * kPrime;
    }
  }
  uint64_t digest = 0xcbf29ce484222325U;
  for (; at < count; ++at) digest = (digest ^ from[at]) * kPrime;
  for (const uint64_t lane : lanes) digest = (digest ^ lane) * kPrime;
  return digest;
}

}  // namespace deeptide
