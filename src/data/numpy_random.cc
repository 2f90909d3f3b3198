// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The numbers of numpy.random.default_rng(seed).
#include "data/numpy_random.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

namespace deeptide::data {
namespace {

/// SeedSequence's hash: each call moves its constant on.
class Hash {
 public:
  Hash(uint32_t start, uint32_t factor) : constant_(start), factor_(factor) {}
  uint32_t operator()(uint32_t value) {
    value ^= constant_;
    constant_ *= factor_;
    value *= constant_;
    return value ^ (value >> 16);
  }

 private:
  uint32_t constant_, factor_;
};

uint32_t mix(uint32_t a, uint32_t b) {
  const uint32_t result = 0xca01f9ddu * a - 0x4973f715u * b;
  return result ^ (result >> 16);
}

std::array<uint64_t, 4> seed_words(uint64_t seed) {
  std::array<uint32_t, 4> pool = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), 0, 0};
  Hash in(0x43b0d7e5u, 0x931e8875u);
  for (uint32_t& word : pool) word = in(word);
  for (size_t from = 0; from < pool.size(); ++from) {
    for (size_t to = 0; to < pool.size(); ++to) {
      if (from != to) pool[to] = mix(pool[to], in(pool[from]));
    }
  }
  Hash out(0x8b51f9ddu, 0x58f38dedu);
  std::array<uint64_t, 4> words = {};
  for (size_t i = 0; i < 8; ++i) words[i / 2] |= uint64_t{out(pool[i % 4])} << (i % 2 * 32);
  return words;
}

}  // namespace

NumpyRandom::NumpyRandom(uint64_t seed) {
  const auto words = seed_words(seed);
  increment_ = ((Wide{words[2]} << 64 | words[3]) << 1) | 1;
  // The generator steps once from zero, takes the seed in, and steps again.
  state_ = increment_ + (Wide{words[0]} << 64 | words[1]);
  next64();
  has_half_ = false;
}

uint64_t NumpyRandom::next64() {
  constexpr Wide kFactor = Wide{0x2360ed051fc65da4u} << 64 | 0x4385df649fccf645u;
  state_ = state_ * kFactor + increment_;
  return std::rotr(static_cast<uint64_t>(state_ >> 64) ^ static_cast<uint64_t>(state_),
                   static_cast<int>(state_ >> 122));
}

uint32_t NumpyRandom::next32() {
  if (has_half_) {
    has_half_ = false;
    return half_;
  }
  const uint64_t both = next64();
  has_half_ = true;
  half_ = static_cast<uint32_t>(both >> 32);
  return static_cast<uint32_t>(both);
}

// By rejection of what the fewest bits that suffice give.
uint64_t NumpyRandom::bounded(uint64_t last) {
  if (last == 0) return 0;
  const uint64_t mask = ~uint64_t{0} >> std::countl_zero(last);
  const bool wide = last > std::numeric_limits<uint32_t>::max();
  for (;;) {
    const uint64_t value = (wide ? next64() : next32()) & mask;
    if (value <= last) return value;
  }
}

std::vector<int64_t> NumpyRandom::choose(const std::vector<int64_t>& weights, int64_t count) {
  int64_t sum = 0;
  for (const int64_t weight : weights) sum += weight;
  std::vector<double> bounds;
  double before = 0.0;
  for (const int64_t weight : weights) {
    before += static_cast<double>(weight) / static_cast<double>(sum);
    bounds.push_back(before);
  }
  for (double& bound : bounds) bound /= before;
  std::vector<int64_t> counts(weights.size(), 0);
  for (int64_t i = 0; i < count; ++i) {
    const auto found = std::upper_bound(bounds.begin(), bounds.end(), next_double());
    ++counts[static_cast<size_t>(found - bounds.begin())];
  }
  return counts;
}

}  // namespace deeptide::data
