// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps a queue of buckets with the numbers of their offers.
#include "gradients/route/lent_buckets.h"

#include "comm/blocking.h"

namespace deeptide::gradients {

void LentBuckets::lend(at::Tensor bucket, uint32_t offer) {
  exchange_.set_read(offer);
  {
    std::lock_guard lock(mutex_);
    lent_.push_back({std::move(bucket), offer});
  }
  reclaim();
}

void LentBuckets::reclaim() {
  std::lock_guard lock(mutex_);
  while (!lent_.empty() && exchange_.all_read(lent_.front().offer)) {
    pool_.put(std::move(lent_.front().bucket));
    lent_.pop_front();
  }
}

std::optional<uint32_t> LentBuckets::first() const {
  std::lock_guard lock(mutex_);
  return lent_.empty() ? std::nullopt : std::optional(lent_.front().offer);
}

bool LentBuckets::empty() const { return !first(); }

bool LentBuckets::first_is_read() const {
  const auto offer = first();
  return !offer || exchange_.all_read(*offer);
}

bool LentBuckets::wait_for_first(std::chrono::milliseconds limit) {
  const auto offer = first();
  bool done = !offer;
  if (offer) comm::run_blocking([&] { done = exchange_.wait_read(*offer, limit); });
  return done;
}

}  // namespace deeptide::gradients
