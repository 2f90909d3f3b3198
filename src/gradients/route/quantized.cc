// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sends all-to-all, in whole numbers of few bits: every contribution is rounded, a rank's own too, so that sums depend
// neither on who takes them nor on how many take the same one.
#include <ATen/ops/sub.h>

#include "base/invariant.h"
#include "comm/codecs/quantized_codec.h"
#include "gradients/route/route.h"

namespace deeptide::gradients {

using at::Tensor;

namespace {

class QuantizedRoute : public Route {
 public:
  QuantizedRoute(const Parts& parts, const RouteFacts& facts) : Route(parts, facts), codec_(facts.bits, &lost_) {}

  void start(Shipment& shipment) override {
    if (is_alone(shipment)) return;
    take_arrival(shipment);
    const int64_t ranks = group(shipment).size(), slices = ranks / unit(shipment).layout().copies;
    if (parts_.errors != nullptr) add_error(shipment);
    for (int64_t row = 0; row < ranks; ++row) {
      codec_.encode(row_of(shipment.bucket, row % slices, shard_of(shipment)), message(shipment, row));
    }
    if (parts_.errors != nullptr) keep_error(shipment, slices);
    const int64_t half = shipment.arrived.numel() / 2;
    shipment.pending =
        group(shipment).all_to_all(shipment.arrived.narrow(0, half, half), shipment.arrived.narrow(0, 0, half));
  }

  /// Rows lie in the bucket from then on, or in one for all teams that share the unit's slices.
  void arrive(Shipment& shipment) override {
    if (is_alone(shipment)) return;
    const int64_t ranks = group(shipment).size(), shard = shard_of(shipment);
    if (shipment.bucket.numel() < ranks * shard) {
      parts_.buckets.put(std::exchange(shipment.bucket, parts_.buckets.take(ranks * shard, facts_.dtype)));
    }
    for (int64_t row = 0; row < ranks; ++row) {
      codec_.decode(message(shipment, ranks + row), row_of(shipment.bucket, row, shard));
    }
    parts_.arrivals.put(std::exchange(shipment.arrived, Tensor()));
  }

  std::vector<Tensor> rows(const Shipment& shipment) const override {
    std::vector<Tensor> rows;
    for (int64_t rank = 0; rank < group(shipment).size(); ++rank) {
      rows.push_back(row_of(shipment.bucket, rank, shard_of(shipment)));
    }
    return rows;
  }

  numerics::QuantizationLoss take_lost() override { return std::exchange(lost_, {}); }

 private:
  bool is_alone(const Shipment& shipment) const { return group(shipment).size() == 1; }
  int64_t shard_of(const Shipment& shipment) const { return unit(shipment).layout().shard; }
  static Tensor row_of(const Tensor& rows, int64_t row, int64_t numel) { return rows.narrow(0, row * numel, numel); }
  const Tensor& error_of(const Shipment& shipment) const {
    return parts_.errors->of_units[static_cast<size_t>(shipment.unit)];
  }
  void add_error(const Shipment& shipment) const {
    const Tensor& error = error_of(shipment);
    shipment.bucket.narrow(0, 0, error.numel()).add_(error, parts_.errors->loss_scale);
  }
  /// Ranks that share a slice get equal messages: the first one tells what rounding has left. An element that is not
  /// finite leaves none.
  void keep_error(const Shipment& shipment, int64_t slices) const {
    for (int64_t slice = 0; slice < slices; ++slice) {
      Tensor error = row_of(error_of(shipment), slice, shard_of(shipment));
      codec_.decode(message(shipment, slice), error);
      at::sub_out(error, row_of(shipment.bucket, slice, shard_of(shipment)), error);
    }
    error_of(shipment).div_(parts_.errors->loss_scale).nan_to_num_(0.0, 0.0, 0.0);
  }
  /// Those that leave, then those that arrive.
  Tensor message(const Shipment& shipment, int64_t number) const {
    return row_of(shipment.arrived, number, numerics::quantized_bytes(shard_of(shipment), facts_.bits));
  }

  numerics::QuantizationLoss lost_;
  const comm::QuantizedCodec codec_;
};

}  // namespace

std::unique_ptr<Route> make_quantized_route(const Route::Parts& parts, const RouteFacts& facts) {
  DEEPTIDE_INVARIANT(facts.dtype == at::kFloat, "quantized buckets of ", facts.dtype);
  return std::make_unique<QuantizedRoute>(parts, facts);
}

RouteForecast forecast_quantized(const RouteFacts& facts) {
  return {.arriving = 2, .dtype = at::kByte, .bits = facts.bits};
}

}  // namespace deeptide::gradients
