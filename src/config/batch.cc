// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The three batch sizes for one world: what is given determines the rest.
#include "config/batch.h"

#include "deeptide/errors.h"

namespace deeptide::config {
namespace {

std::string words(int64_t value) { return std::to_string(value); }

int64_t product(int64_t a, int64_t b, const std::string& origin) {
  int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) {
    throw ConfigError(origin + ": the batch sizes multiply beyond 64 bits; use smaller ones");
  }
  return result;
}

void check_positive(const char* name, int64_t value, const std::string& cure, const std::string& origin) {
  if (value <= 0) {
    throw ConfigError(origin + ": " + name + ": " + words(value) + " has to be greater than 0; " + cure);
  }
}

void check_given(const BatchConfig& batch, int64_t world_size, const std::string& origin) {
  if (world_size <= 0) {
    throw ConfigError(origin + ": the world size is " + words(world_size) + ", expected at least 1");
  }
  const std::string cure = "give a positive number or leave it out";
  check_positive("Train batch size", batch.train_batch_size.value_or(1), cure, origin);
  check_positive("Micro batch size per gpu", batch.micro_batch_size.value_or(1), cure, origin);
  check_positive("Gradient accumulation steps", batch.gradient_accumulation_steps.value_or(1), cure, origin);
  if (!batch.train_batch_size && !batch.micro_batch_size) {
    throw ConfigError(origin +
                      ": Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided; "
                      "any one of them is enough");
  }
}

// Rounds down where sizes do not divide; batch_sizes() detects that afterwards.
BatchSizes derive(const BatchConfig& batch, int64_t world_size, const std::string& origin) {
  BatchSizes sizes;
  if (!batch.train_batch_size) {
    sizes.micro = *batch.micro_batch_size;
    sizes.accumulation = batch.gradient_accumulation_steps.value_or(1);
    sizes.train = product(product(sizes.micro, sizes.accumulation, origin), world_size, origin);
    return sizes;
  }
  sizes.train = *batch.train_batch_size;
  if (batch.micro_batch_size) {
    sizes.micro = *batch.micro_batch_size;
    sizes.accumulation = batch.gradient_accumulation_steps.value_or(sizes.train / sizes.micro / world_size);
  } else {
    sizes.accumulation = batch.gradient_accumulation_steps.value_or(1);
    sizes.micro = sizes.train / world_size / sizes.accumulation;
  }
  return sizes;
}

std::string multiple_cure(const BatchConfig& batch, int64_t world_size, const std::string& origin) {
  int64_t unit = world_size;
  std::string factors = words(world_size) + " ranks";
  if (batch.micro_batch_size) {
    unit = product(unit, *batch.micro_batch_size, origin);
    factors += " x micro-batches of " + words(*batch.micro_batch_size);
  }
  if (batch.gradient_accumulation_steps) {
    unit = product(unit, *batch.gradient_accumulation_steps, origin);
    factors += " x " + words(*batch.gradient_accumulation_steps) + " accumulation steps";
  }
  if (batch.micro_batch_size && batch.gradient_accumulation_steps) {
    return "set train_batch_size to " + words(unit) + " (" + factors + ") or leave one of the three out";
  }
  return "make train_batch_size a multiple of " + words(unit) + " (" + factors + ")";
}

}  // namespace

BatchSizes batch_sizes(const BatchConfig& batch, int64_t world_size, const std::string& origin) {
  check_given(batch, world_size, origin);
  const BatchSizes sizes = derive(batch, world_size, origin);
  const std::string cure = multiple_cure(batch, world_size, origin);
  check_positive("Micro batch size per gpu", sizes.micro, cure, origin);
  check_positive("Gradient accumulation steps", sizes.accumulation, cure, origin);
  if (product(product(sizes.micro, sizes.accumulation, origin), world_size, origin) != sizes.train) {
    throw ConfigError(origin +
                      ": Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "
                      "gradient_acc_step * world_size " +
                      words(sizes.train) + " != " + words(sizes.micro) + " * " + words(sizes.accumulation) + " * " +
                      words(world_size) + "; " + cure);
  }
  return sizes;
}

}  // namespace deeptide::config
