// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sends every rank the blocks of its row that are not zero.
#include "comm/codecs/nonzero_codec.h"
#include "gradients/route/route.h"

namespace deeptide::gradients {

using at::Tensor;

namespace {

class NonzeroRoute : public Route {
 public:
  using Route::Route;

  void start(Shipment& shipment) override {
    shipment.arrived = parts_.arrivals.take(shipment.bucket.numel(), facts_.dtype);
    comm::all_to_all_coded(group(), comm::NonzeroCodec(), shipment.arrived, shipment.bucket, parts_.buckets,
                           reduction_site(unit(shipment), "step"));
  }

  void arrive(Shipment& shipment) override { parts_.buckets.put(std::exchange(shipment.bucket, Tensor())); }

  std::vector<Tensor> rows(const Shipment& shipment) const override {
    const int64_t shard = unit(shipment).layout().shard;
    std::vector<Tensor> rows;
    for (int64_t rank = 0; rank < facts_.num_ranks; ++rank) {
      rows.push_back(shipment.arrived.narrow(0, rank * shard, shard));
    }
    return rows;
  }
};

}  // namespace

std::unique_ptr<Route> make_nonzero_route(const Route::Parts& parts, const RouteFacts& facts) {
  return std::make_unique<NonzeroRoute>(parts, facts);
}

}  // namespace deeptide::gradients
