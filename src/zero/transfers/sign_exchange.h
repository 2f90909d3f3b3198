// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Means over ranks of which one bit per element travels; what the signs leave out joins the next step's.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "comm/codecs/sign_codec.h"
#include "comm/team_groups.h"
#include "device/memory/memory.h"
#include "sharding/unit.h"
#include "zero/states/step_counts.h"

namespace deeptide::zero {

/// Units: bytes.
struct SignForecast {
  int64_t errors = 0;    // what signs have left out
  int64_t messages = 0;  // those sent and received
};

/// Compressed mean with error feedback on both sides. A *piece* is what one slice of the unit holds of one parameter:
/// it travels as its signs and one scale, the root of its mean square. Per unit, each rank sends its pieces of slice r
/// to rank r; rank r adds their mean to its own error, splits that again, and sends it to all. All ranks then hold the
/// same bits. With one rank nothing is compressed. The ranks are those of the unit's own team, as of a slice's.
/// For each unit call carried, send, serve, receive; all units' `send` may precede the first `serve`.
/// Source: Tang et al. arXiv:2102.02888, sec. 4; DeepSpeed's compressed_allreduce.
class SignExchange {
 public:
  SignExchange(const std::vector<sharding::Unit*>& units, const comm::TeamGroups& teams,
               std::shared_ptr<device::Ledger> ledger, at::Device device);

  /// The error that this rank's signs have left (numel,) fp32: add what this rank offers, zero in the gaps between
  /// parameters.
  const at::Tensor& carried(int unit) const { return messages_[unit].carried; }
  /// Collective, as are the next two: sends the signs of what is carried, for the active parameters.
  void send(int unit, const ActiveParameters& active);
  /// Waits for the others' signs of this rank's slice, and sends those of their mean.
  void serve(int unit, const ActiveParameters& active);
  /// Writes the mean (numel,) fp32: zeros in the gaps; what is not active holds nothing of meaning.
  void receive(int unit, const ActiveParameters& active, const at::Tensor& mean);

  /// The errors themselves, by unit: what is carried, and with several ranks that of the mean of this rank's slice.
  std::vector<at::Tensor> errors() const;
  /// Forgets the errors: what they belong to has been replaced.
  void reset();
  SignForecast predicted() const;
  static SignForecast forecast(const std::vector<const sharding::UnitLayout*>& units);
  /// Bytes that a rank sends to the others for one step of all units.
  int64_t bytes_per_step() const;

 private:
  struct Piece {
    int parameter;
    int64_t begin;  // in the unit
    int64_t count;
  };
  struct UnitMessages {
    comm::Group* group = nullptr;  // over the unit's team
    std::vector<std::vector<Piece>> slices;
    int64_t num_scales = 0;  // that a slice's message has room for
    int64_t bytes = 0;       // of a slice's message
    at::Tensor carried, served;
    at::Tensor sent, received;  // (W * bytes,) uint8
    comm::Pending pending;
  };
  comm::SignCodec codec(int unit, int slice, const ActiveParameters& active) const;
  at::Tensor row(int unit, const at::Tensor& messages, int slice) const;
  void allocate(const sharding::Unit& unit, UnitMessages& messages);
  comm::Group& group(int unit) const { return *messages_[unit].group; }
  comm::Site site(int unit) const;

  std::vector<sharding::Unit*> units_;
  std::shared_ptr<device::Ledger> ledger_;
  at::Device device_;
  std::vector<UnitMessages> messages_;
  at::Tensor squares_;  // (1,) fp64
};

}  // namespace deeptide::zero
