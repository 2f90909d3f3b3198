// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rounds ranges, compiled once per instruction set.
#include "numerics/rounding/stochastic_rounding.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "numerics/rounding/stochastic_rounding.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway asks.
#include "numerics/rounding/stochastic_rounding-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deeptide::numerics::HWY_NAMESPACE {

void round_range(const float* from, size_t count, uint16_t* to, const RandomKey& key, int stream, int64_t index) {
  each_vector(0, count, [&](auto part, size_t i) {
    const U random = random_bits(key, stream / 2, index + static_cast<int64_t>(i));
    part.put_bits(rounded_by(part.get(from + i), bits_of_stream(random, stream)), to + i);
  });
}

}  // namespace deeptide::numerics::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deeptide::numerics {

HWY_EXPORT(round_range);

namespace {

/// Source: Steele, Lea, Flood, OOPSLA 2014.
uint64_t split_mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

RandomKey RandomKey::of(uint64_t seed, uint64_t step) {
  RandomKey key;
  for (uint64_t pair = 0; pair < kStreams / 2; ++pair) {
    const uint64_t bits = split_mix(split_mix(split_mix(seed) ^ step) ^ pair);
    key.first[pair] = static_cast<uint32_t>(bits);
    key.second[pair] = static_cast<uint32_t>(bits >> 32);
  }
  return key;
}

void round_stochastically(const float* from, int64_t count, uint16_t* to, const RandomKey& key, int stream,
                          int64_t index) {
  HWY_DYNAMIC_DISPATCH(round_range)(from, static_cast<size_t>(count), to, key, stream, index);
}

}  // namespace deeptide::numerics
#endif  // HWY_ONCE
