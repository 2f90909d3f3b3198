// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Chooses a way, and does what most of them do alike.
#include "gradients/route/route.h"

namespace deeptide::gradients {

namespace {

struct Way {
  std::unique_ptr<Route> (*make)(const Route::Parts&, const RouteFacts&);
  RouteForecast (*forecast)(const RouteFacts&);
};

Way way_of(const RouteFacts& facts) {
  if (facts.shares_memory) return {make_shared_memory_route, forecast_shared_memory};
  if (facts.bits > 0 && facts.num_ranks > 1) return {make_quantized_route, forecast_quantized};
  if (facts.together > 1) return {make_two_level_route, forecast_two_levels};
  if (facts.ordered) return {make_all_to_all_route, forecast_all_to_all};
  return {make_transport_route, forecast_transport};
}

}  // namespace

RouteForecast forecast(const RouteFacts& facts) { return way_of(facts).forecast(facts); }

std::unique_ptr<Route> make_route(const Route::Parts& parts, const RouteFacts& facts) {
  return way_of(facts).make(parts, facts);
}

void Route::take_arrival(Shipment& shipment) const {
  shipment.arrived = parts_.arrivals.take(forecast_.arriving_numel(unit(shipment).layout()), forecast_.dtype);
}

void Route::end(Shipment& shipment) {
  parts_.arrivals.put(std::move(shipment.arrived));
  parts_.buckets.put(std::move(shipment.bucket));
  shipment.held.reset();
}

comm::Site reduction_site(const sharding::Unit& unit, const char* phase) {
  return {phase, "reducing gradients of unit '" + unit.layout().name + "'"};
}

}  // namespace deeptide::gradients
