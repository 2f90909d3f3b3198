// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// fp32 to one of its two neighbours in bf16, to each with the probability that makes the mean exact.
//
// The random bits of an element are a hash of (seed, step, stream, index): the integer hash "lowbias32" (C. Wellons,
// hash-prospector), keyed before and in its middle by SplitMix64. No generator has a state, so a resumed run draws what
// the run would have drawn, and the ranks draw alike however elements are shared out.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace deeptide::numerics {

/// The random bits of one step.
struct RandomKey {
  static constexpr int kStreams = 4;

  uint32_t first[kStreams / 2] = {};  // of two streams each
  uint32_t second[kStreams / 2] = {};

  static RandomKey of(uint64_t seed, uint64_t step);
};

/// to[i] = from[i] in bf16, rounded by the 16 bits that `stream` has for element `index + i`. Zeros, infinities and
/// NaNs stay what they are; a finite number stays finite. On the calling thread.
void round_stochastically(const float* from, int64_t count, uint16_t* to, const RandomKey& key, int stream,
                          int64_t index);

/// The same of tensors (N,) in ATen operators, on any device, with equal bits.
void round_stochastically(const at::Tensor& from, const at::Tensor& to, const RandomKey& key, int stream,
                          int64_t index);

}  // namespace deeptide::numerics
