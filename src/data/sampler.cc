// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Chooses a rank's samples by a keyed permutation, computed point by point: nothing is stored, nothing is shuffled.
#include <bit>
#include <string>

#include "deeptide/data.h"

namespace deeptide {
namespace {

// Suffices for tiny domains too, where a half has one or two bits.
constexpr int kRounds = 8;

// The finaliser of SplitMix64. Source: Steele, Lea, Flood, OOPSLA 2014, doi:10.1145/2660193.2660195.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// A balanced Feistel network: a bijection on [0, 4^half_bits) for any round function.
uint64_t feistel(uint64_t value, int half_bits, uint64_t key) {
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  uint64_t left = value >> half_bits;
  uint64_t right = value & mask;
  for (int round = 0; round < kRounds; ++round) {
    // The mixer's high bits are its best.
    const uint64_t next = left ^ (mix(mix(key + round) ^ right) >> (64 - half_bits));
    left = right;
    right = next;
  }
  return left << half_bits | right;
}

[[noreturn]] void fail(const std::string& what, int64_t got, const std::string& expected) {
  throw ConfigError("data sampler: " + what + " is " + std::to_string(got) + ", expected " + expected);
}

void check_positive(const char* what, int64_t value) {
  if (value <= 0) fail(what, value, "at least 1");
}

}  // namespace

DistributedSampler::DistributedSampler(int64_t num_samples, const Options& options)
    : num_samples_(num_samples), options_(options) {
  check_positive("num_samples", num_samples);
  check_positive("batch_size", options.batch_size);
  check_positive("world_size", options.world_size);
  if (options.rank < 0 || options.rank >= options.world_size) {
    fail("rank", options.rank, "0 to " + std::to_string(options.world_size - 1));
  }
  int64_t joined;
  if (__builtin_mul_overflow(options.batch_size, int64_t{options.world_size}, &joined)) {
    fail("batch_size", options.batch_size, "a product with world_size that 64 bits hold");
  }
  if (batches_per_epoch() == 0) {
    fail("num_samples", num_samples,
         "at least batch_size * world_size = " + std::to_string(joined) +
             " with drop_last; add data, or set drop_last to false or a smaller batch");
  }
}

int64_t DistributedSampler::batches_per_epoch() const {
  const int64_t joined = options_.batch_size * options_.world_size;
  const bool partial = num_samples_ % joined != 0 && !options_.drop_last;
  return num_samples_ / joined + (partial ? 1 : 0);
}

std::vector<int64_t> DistributedSampler::next() {
  if (position_.batch == batches_per_epoch()) {
    position_ = {position_.epoch + 1, 0};
    return {};
  }
  const uint64_t batch = options_.batch_size;
  const uint64_t start = (uint64_t(position_.batch) * options_.world_size + options_.rank) * batch;
  // Ranks need batches of one size; a rank alone takes a short last one.
  const uint64_t count =
      options_.world_size == 1 ? std::min(batch, static_cast<uint64_t>(num_samples_) - start) : batch;
  std::vector<int64_t> indices(count);
  for (uint64_t i = 0; i < count; ++i) {
    indices[i] = permute(position_.epoch, static_cast<int64_t>((start + i) % uint64_t(num_samples_)));
  }
  ++position_.batch;
  return indices;
}

DistributedSampler::Position DistributedSampler::position() const { return position_; }

void DistributedSampler::set_position(Position position) {
  if (position.epoch < 0) fail("the position's epoch", position.epoch, "at least 0");
  if (position.batch < 0 || position.batch > batches_per_epoch()) {
    fail("the position's batch", position.batch,
         "0 to " + std::to_string(batches_per_epoch()) + " (was it saved with another data size, batch or world?)");
  }
  position_ = position;
}

int64_t DistributedSampler::permute(int64_t epoch, int64_t index) const {
  if (epoch < 0) fail("the epoch", epoch, "at least 0");
  if (index < 0 || index >= num_samples_) fail("the index", index, "0 to " + std::to_string(num_samples_ - 1));
  if (!options_.shuffle || num_samples_ == 1) return index;
  const int half_bits = (static_cast<int>(std::bit_width(uint64_t(num_samples_ - 1))) + 1) / 2;
  const uint64_t key = mix(mix(options_.seed) + uint64_t(epoch));
  // The network permutes up to 4 times more values than there are samples: walk its cycle until one is a sample.
  uint64_t value = uint64_t(index);
  do {
    value = feistel(value, half_bits, key);
  } while (value >= uint64_t(num_samples_));
  return static_cast<int64_t>(value);
}

}  // namespace deeptide
