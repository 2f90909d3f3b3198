// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Decides when a program without step() is worth a line.
#include "engine/run/passes.h"

#include <algorithm>

#include "base/libraries/format.h"
#include "base/log.h"

namespace deeptide::engine {

namespace {

constexpr int64_t kMany = 50;     // passes without a step, that a program may well mean if it accumulates by hand
constexpr int64_t kAtTheEnd = 8;  // passes of a program that ends without a step; fewer may be a measurement

}  // namespace

Passes::~Passes() {
  const int64_t passes = since_step_;
  if (!speaks_ || has_stepped_ || has_warned_ || passes < kAtTheEnd) return;
  log(LogLevel::warning,
      format_text("{} backward passes and not one step(): nothing was trained. Call engine.step() after each "
                  "engine.backward(loss); it counts micro-batches, and steps at the accumulation's end",
                  passes));
}

void Passes::note_own() {
  has_own_ = true;
  count();
}

void Passes::note_gradient(int tensor, bool is_own) {
  if (is_own) return;
  foreign_[static_cast<size_t>(tensor)] = 1;
  has_foreign_ = true;
  int none = -1;
  if (first_.compare_exchange_strong(none, tensor) || none == tensor) count();
}

void Passes::count() {
  const int64_t passes = ++since_step_;
  if (has_warned_ || passes <= std::max({kMany, 2 * accumulation_, 2 * most_})) return;
  has_warned_ = true;
  if (!speaks_) return;
  log(LogLevel::warning,
      format_text("{} backward passes since the last step(){}: their gradients add up, and no parameter changes. Call "
                  "engine.step() after each backward; an optimizer of torch's has no part in it. A program that means "
                  "to add up so many needs nothing",
                  passes, has_stepped_ ? "" : ", which was never called"));
}

void Passes::note_step() {
  most_ = std::max<int64_t>(most_, since_step_.exchange(0));
  has_stepped_ = true;
  first_ = -1;
}

int Passes::take_mixture() {
  const bool mixed = has_own_ && has_foreign_ && !has_told_mixture_;
  const auto found = std::find(foreign_.begin(), foreign_.end(), 1);
  const int tensor = mixed && found != foreign_.end() ? static_cast<int>(found - foreign_.begin()) : -1;
  has_told_mixture_ = has_told_mixture_ || tensor >= 0;
  forget();
  return tensor;
}

void Passes::forget() {
  has_own_ = false;
  if (has_foreign_.exchange(false)) std::fill(foreign_.begin(), foreign_.end(), 0);
}

}  // namespace deeptide::engine
