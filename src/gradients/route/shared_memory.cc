// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Offers buckets to the ranks of one host, who read their rows in place: nothing travels.
#include "gradients/route/route.h"

namespace deeptide::gradients {

namespace {

/// Buckets under way at a time: nothing is received, and ranks may drift further apart.
constexpr size_t kMostOffered = 4;

class SharedMemoryRoute : public Route {
 public:
  SharedMemoryRoute(const Parts& parts, const RouteFacts& facts)
      : Route(parts, facts), lent_(*parts.exchange, parts.buckets) {}

  void start(Shipment& shipment) override {
    auto offer = parts_.exchange->offer(shipment.bucket);
    const auto bytes = static_cast<int64_t>(shipment.bucket.nbytes());
    shipment.pending = group().track(std::move(offer.operation), "reduce-scatter", bytes);
    shipment.offer = offer.number;
  }

  std::vector<at::Tensor> rows(const Shipment& shipment) const override {
    const sharding::Unit& u = unit(shipment);
    return parts_.exchange->rows(shipment.offer, u.shard_begin(), u.layout().shard, facts_.dtype);
  }

  void end(Shipment& shipment) override { lent_.lend(std::move(shipment.bucket), shipment.offer); }
  LentBuckets* lent() override { return &lent_; }

 private:
  LentBuckets lent_;
};

}  // namespace

std::unique_ptr<Route> make_shared_memory_route(const Route::Parts& parts, const RouteFacts& facts) {
  return std::make_unique<SharedMemoryRoute>(parts, facts);
}

RouteForecast forecast_shared_memory(const RouteFacts&) { return {.pace = kMostOffered}; }

}  // namespace deeptide::gradients
