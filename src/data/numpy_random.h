// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The numbers of numpy.random.default_rng(seed), so that samplers draw what DeepSpeed's draw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace deeptide::data {

__extension__ typedef unsigned __int128 Wide;  // NOLINT(modernize-use-using): an alias has no __extension__

/// PCG64, seeded by numpy's SeedSequence. Source: O'Neill, HMC-CS-2014-0905; numpy's NEP 19.
class NumpyRandom {
 public:
  explicit NumpyRandom(uint64_t seed);

  uint64_t next64();
  uint32_t next32();
  /// In [0, 1), with 53 bits.
  double next_double() { return static_cast<double>(next64() >> 11) * (1.0 / 9007199254740992.0); }
  /// A number from 0 to `last`, as Generator.shuffle draws its places.
  uint64_t bounded(uint64_t last);

  /// Generator.shuffle.
  template <typename T>
  void shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i-- > 1;) std::swap(values[i], values[bounded(i)]);
  }
  /// Generator.choice(len(weights), count, p=weights / sum), counted: how often each index came up.
  std::vector<int64_t> choose(const std::vector<int64_t>& weights, int64_t count);

 private:
  Wide state_ = 0, increment_ = 0;
  bool has_half_ = false;
  uint32_t half_ = 0;
};

}  // namespace deeptide::data
