// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which samples a rank sees, in which order, from which position: equal in C++ and in Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "deeptide/errors.h"

namespace deeptide {

/// Deals the indices 0 … num_samples-1 to `world_size` ranks, batch by batch. An epoch's order is a pseudo-random
/// permutation that depends on (seed, epoch) alone, so a position is two integers and needs no generator state. Batch k
/// of rank r takes the permuted positions k*world*batch + r*batch …; with drop_last false the last batches wrap around
/// to the epoch's start, so that all ranks have equal numbers of batches.
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
    int64_t batch = 0;  // batches already returned in this epoch
  };

  /// Errors: ValueError (ConfigError) if a size is not positive, or drop_last leaves no batch.
  DistributedSampler(int64_t num_samples, const Options& options);
  int64_t batches_per_epoch() const;
  /// Returns the next batch's indices; empty at an epoch's end (the next call starts the next epoch).
  std::vector<int64_t> next();
  Position position() const;
  void set_position(Position position);
  /// Returns the JSON object with the position added, under the key by which Python's DataLoader keeps its own there:
  /// for Engine::save_checkpoint(directory, tag, sampler.add_position()). It is counted in samples of the whole world,
  /// so it holds for another number of ranks too. Errors: ConfigError for a text that is no JSON object.
  std::string add_position(const std::string& client_state_json = "{}") const;
  /// Goes on where the position in LoadedCheckpoint::client_state_json was; false without one.
  /// Errors: ConfigError, with the position unchanged, when it is of another dataset or seed, or no JSON object.
  bool take_position(const std::string& client_state_json);
  /// The sample at `index` of the epoch's order: a bijection on [0, num_samples), by Feistel network and cycle walking.
  int64_t permute(int64_t epoch, int64_t index) const;

 private:
  int64_t num_samples_;
  Options options_;
  Position position_;
};

}  // namespace deeptide
