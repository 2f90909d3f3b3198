// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which samples a rank sees, in which order, from which position: the same in C++ and in Python.
#pragma once

#include <cstdint>
#include <vector>

#include "deeptide/errors.h"

namespace deeptide {

/// Deals the indices 0 … num_samples-1 to `world_size` ranks, batch by batch. The order of an epoch is a pseudo-random
/// permutation that depends on (seed, epoch) alone, so a position is two integers and needs no generator state.
/// The batch k of rank r takes the permuted positions k*world*batch + r*batch … ; with drop_last false the last batches
/// wrap around to the epoch's start so that every rank has the same number of batches.
class DEEPTIDE_API DistributedSampler {
 public:
  struct Options {
    int64_t batch_size = 1;  // per rank
    int rank = 0;
    int world_size = 1;
    bool shuffle = true;
    bool drop_last = false;
    uint64_t seed = 0;
  };
  struct Position {
    int64_t epoch = 0;
    int64_t batch = 0;  // batches already given in this epoch
  };

  /// Errors: ValueError (ConfigError) when a size is not positive, or drop_last leaves no batch.
  DistributedSampler(int64_t num_samples, const Options& options);
  int64_t batches_per_epoch() const;
  /// The next batch's indices; empty at an epoch's end (the next call starts the next epoch).
  std::vector<int64_t> next();
  Position position() const;
  void set_position(Position position);
  /// Where sample `index` of the epoch's order is; a bijection on [0, num_samples). Feistel network with cycle walking.
  int64_t permute(int64_t epoch, int64_t index) const;

 private:
  int64_t num_samples_;
  Options options_;
  Position position_;
};

}  // namespace deeptide
