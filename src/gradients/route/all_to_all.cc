// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sends every rank its row of the bucket. Where several ranks have each slice, all of them get its row.
#include "gradients/route/route.h"

namespace deeptide::gradients {

using at::Tensor;

namespace {

class AllToAllRoute : public Route {
 public:
  using Route::Route;

  void start(Shipment& shipment) override {
    if (facts_.num_ranks == 1) return;
    if (unit(shipment).layout().copies > 1) repeat(shipment);
    take_arrival(shipment);
    shipment.pending = group(shipment).all_to_all(shipment.arrived, shipment.bucket,
                                                  own_row_stays() ? comm::OwnRow::left : comm::OwnRow::copied);
  }

  void arrive(Shipment& shipment) override {
    if (facts_.num_ranks > 1 && !own_row_stays()) parts_.buckets.put(std::exchange(shipment.bucket, Tensor()));
  }

  std::vector<Tensor> rows(const Shipment& shipment) const override {
    if (facts_.num_ranks == 1) return {shipment.bucket};
    const int64_t shard = unit(shipment).layout().shard, own = group(shipment).index();
    std::vector<Tensor> rows;
    for (int64_t rank = 0; rank < group(shipment).size(); ++rank) {
      const Tensor& from = rank == own && own_row_stays() ? shipment.bucket : shipment.arrived;
      rows.push_back(from.narrow(0, rank * shard, shard));
    }
    return rows;
  }

 private:
  /// The ranks that reduce a unit are whole teams that share its slices, one after the other: to each goes the bucket.
  void repeat(Shipment& shipment) const {
    const sharding::UnitLayout& layout = unit(shipment).layout();
    const Tensor all = parts_.buckets.take(layout.numel * layout.copies, facts_.dtype);
    for (int64_t copy = 0; copy < layout.copies; ++copy) {
      all.narrow(0, copy * layout.numel, layout.numel).copy_(shipment.bucket);
    }
    parts_.buckets.put(std::exchange(shipment.bucket, all));
  }

  /// Rows that are kept leave the bucket to others.
  bool own_row_stays() const { return !facts_.keeps_rows; }
};

}  // namespace

std::unique_ptr<Route> make_all_to_all_route(const Route::Parts& parts, const RouteFacts& facts) {
  return std::make_unique<AllToAllRoute>(parts, facts);
}

RouteForecast forecast_all_to_all(const RouteFacts& facts) {
  return {.arriving = facts.num_ranks > 1 ? 1 : 0, .dtype = facts.dtype};
}

}  // namespace deeptide::gradients
