// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One all-to-all and one all-gather of messages per unit: scales, then packed signs.
#include "zero/transfers/sign_exchange.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/invariant.h"

namespace deeptide::zero {

using at::Tensor;
using device::Role;
using sharding::Parameter;
using sharding::Unit;

namespace {

int64_t num_ranks_of(const sharding::UnitLayout& unit) { return unit.numel / unit.shard; }

/// Every slice has room for as many scales as the one with the most pieces of parameters.
int64_t num_scales_of(const sharding::UnitLayout& unit) {
  const int64_t shard = unit.shard;
  int64_t most = 0;
  for (int64_t slice = 0; slice < num_ranks_of(unit); ++slice) {
    most = std::max<int64_t>(most, std::count_if(unit.slots.begin(), unit.slots.end(), [&](const auto& slot) {
                               return slot.numel > 0 && slot.offset < (slice + 1) * shard &&
                                      slot.offset + slot.numel > slice * shard;
                             }));
  }
  return most;
}

}  // namespace

SignExchange::SignExchange(const std::vector<Unit*>& units, const comm::TeamGroups& teams,
                           std::shared_ptr<device::Ledger> ledger, at::Device device)
    : units_(units),
      ledger_(std::move(ledger)),
      device_(device),
      squares_(at::zeros({1}, at::TensorOptions().dtype(at::kDouble).device(device))) {
  for (const Unit* unit : units_) {
    DEEPTIDE_INVARIANT(unit->layout().copies == 1, "unit '", unit->layout().name, "' has several owners of a slice");
    UnitMessages messages{.group = &teams.of(unit->shard_over())};
    const int64_t shard = unit->layout().shard;
    for (int slice = 0; slice < messages.group->size(); ++slice) {
      std::vector<Piece> pieces;
      for (int p = 0; p < static_cast<int>(unit->parameters().size()); ++p) {
        const Parameter& parameter = unit->parameters()[p];
        const int64_t begin = std::max(parameter.offset, slice * shard);
        const int64_t count = std::min(parameter.offset + parameter.numel, (slice + 1) * shard) - begin;
        if (count > 0) pieces.push_back({p, begin, count});
      }
      messages.slices.push_back(std::move(pieces));
    }
    messages.num_scales = num_scales_of(unit->layout());
    messages.bytes = comm::SignCodec::bytes(shard, messages.num_scales);
    allocate(*unit, messages);
    messages_.push_back(std::move(messages));
  }
}

void SignExchange::allocate(const Unit& unit, UnitMessages& messages) {
  const int ranks = messages.group->size();
  const auto flat = [&](Role role, int64_t numel, at::ScalarType type) {
    return device::allocate_flat(ledger_, role, numel, type, device_);
  };
  if (ranks > 1) {
    messages.served = flat(Role::optimizer, unit.numel() / ranks, at::kFloat);
    messages.sent = flat(Role::communication, ranks * messages.bytes, at::kByte);
    messages.received = flat(Role::communication, ranks * messages.bytes, at::kByte);
  }
  messages.carried = flat(Role::optimizer, unit.numel(), at::kFloat);
}

/// For the slice's active pieces. Parameters begin at multiples of 16 elements, so that signs begin at whole bytes.
comm::SignCodec SignExchange::codec(int unit, int slice, const ActiveParameters& active) const {
  const auto& pieces = messages_[unit].slices[static_cast<size_t>(slice)];
  const int64_t first = slice * units_[unit]->layout().shard;
  std::vector<comm::SignCodec::Piece> coded;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (!active.has(unit, pieces[i].parameter)) continue;
    coded.push_back({pieces[i].begin - first, pieces[i].count, static_cast<int64_t>(i)});
  }
  return {messages_[unit].num_scales, std::move(coded), squares_};
}

Tensor SignExchange::row(int unit, const Tensor& messages, int slice) const {
  const int64_t bytes = messages_[unit].bytes;
  return messages.narrow(0, slice * bytes, bytes);
}

void SignExchange::send(int unit, const ActiveParameters& active) {
  UnitMessages& own = messages_[unit];
  if (group(unit).size() == 1) return;
  const int64_t shard = units_[unit]->layout().shard;
  for (int slice = 0; slice < group(unit).size(); ++slice) {
    codec(unit, slice, active).encode(own.carried.narrow(0, slice * shard, shard), row(unit, own.sent, slice));
  }
  own.pending = group(unit).all_to_all(own.received, own.sent);
}

void SignExchange::serve(int unit, const ActiveParameters& active) {
  UnitMessages& own = messages_[unit];
  if (group(unit).size() == 1) return;
  group(unit).wait(own.pending, site(unit));
  const auto own_slice = codec(unit, group(unit).index(), active);
  for (int rank = 0; rank < group(unit).size();
       ++rank) {  // in rank order: the mean is the same however messages arrive
    own_slice.add(row(unit, own.received, rank), static_cast<double>(group(unit).size()), own.served);
  }
  own_slice.encode(own.served, row(unit, own.sent, 0));
  own.pending = group(unit).all_gather(own.received, own.sent.narrow(0, 0, own.bytes));
}

void SignExchange::receive(int unit, const ActiveParameters& active, const Tensor& mean) {
  UnitMessages& own = messages_[unit];
  if (group(unit).size() == 1) {
    mean.copy_(own.carried);
    own.carried.zero_();
    return;
  }
  group(unit).wait(own.pending, site(unit));
  const int64_t shard = own.served.numel();
  for (int slice = 0; slice < group(unit).size(); ++slice) {
    codec(unit, slice, active).decode(row(unit, own.received, slice), mean.narrow(0, slice * shard, shard));
  }
  int64_t end = 0;  // of the parameters so far
  for (const Parameter& p : units_[unit]->parameters()) {
    if (end < p.offset) mean.narrow(0, end, p.offset - end).zero_();
    end = std::max(end, p.offset + p.numel);
  }
  if (end < mean.numel()) mean.narrow(0, end, mean.numel() - end).zero_();
}

std::vector<Tensor> SignExchange::errors() const {
  std::vector<Tensor> all;
  for (const UnitMessages& messages : messages_) {
    all.push_back(messages.carried);
    if (messages.served.defined()) all.push_back(messages.served);
  }
  return all;
}

void SignExchange::reset() {
  for (UnitMessages& messages : messages_) {
    messages.carried.zero_();
    if (messages.served.defined()) messages.served.zero_();
  }
}

SignForecast SignExchange::predicted() const { return forecast(sharding::layouts_of(units_)); }

SignForecast SignExchange::forecast(const std::vector<const sharding::UnitLayout*>& units) {
  SignForecast bytes;
  for (const sharding::UnitLayout* unit : units) {
    const int64_t ranks = num_ranks_of(*unit);
    const int64_t errors = unit->numel + (ranks > 1 ? unit->shard : 0);
    bytes.errors += errors * static_cast<int64_t>(sizeof(float));
    if (ranks > 1) bytes.messages += 2 * ranks * comm::SignCodec::bytes(unit->shard, num_scales_of(*unit));
  }
  return bytes;
}

int64_t SignExchange::bytes_per_step() const {
  int64_t bytes = 0;
  for (const UnitMessages& messages : messages_) bytes += 2 * (messages.group->size() - 1) * messages.bytes;
  return bytes;
}

comm::Site SignExchange::site(int unit) const {
  return {"step", "exchanging signs of unit '" + units_[unit]->layout().name + "'"};
}

}  // namespace deeptide::zero
