// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Leaves the sum to the transport's reduce-scatter.
#include "gradients/route/route.h"

namespace deeptide::gradients {

using at::Tensor;

namespace {

class TransportRoute : public Route {
 public:
  using Route::Route;

  void start(Shipment& shipment) override {
    if (facts_.num_ranks == 1) return;
    take_arrival(shipment);
    shipment.pending = group().reduce_scatter(shipment.arrived, shipment.bucket);
  }

  void arrive(Shipment& shipment) override {
    if (facts_.num_ranks > 1) parts_.buckets.put(std::exchange(shipment.bucket, Tensor()));
  }

  std::vector<Tensor> rows(const Shipment& shipment) const override {
    return {facts_.num_ranks > 1 ? shipment.arrived : shipment.bucket};
  }
  world::TeamIndex sender(int /*row*/) const override { return world::TeamIndex::none; }
};

}  // namespace

std::unique_ptr<Route> make_transport_route(const Route::Parts& parts, const RouteFacts& facts) {
  return std::make_unique<TransportRoute>(parts, facts);
}

RouteForecast forecast_transport(const RouteFacts& facts) {
  return {.arriving = facts.num_ranks > 1 ? 1 : 0, .of = facts.num_ranks, .dtype = facts.dtype};
}

}  // namespace deeptide::gradients
