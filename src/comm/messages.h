// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Messages between ranks other than tensors: plain data that travels as bytes, one struct per conversation.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <variant>

#include "comm/transport/link_times.h"
#include "deeptide/config.h"
#include "deeptide/reports.h"
#include "numerics/rounding/quantized.h"
#include "world/rank.h"

namespace deeptide::comm {

/// A collective method of the engine. All ranks must be in the same one.
enum class Call : int32_t {
  step,
  save_checkpoint,
  load_checkpoint,
  gather_state,
  release,
  zero_grad,
  show_gradients,
  rebuild,
  offload_states,
  wait_for_save,
  preempt,
  drop_gradients
};

/// The units that a rank needs now, and those that it expects to use next.
struct Wishes {
  static constexpr int kMaxUnits = 24;

  int32_t num_needs = 0;   // units[0 … num_needs) block this rank
  int32_t num_wishes = 0;  // units[num_needs … num_needs + num_wishes) are used soon
  int32_t rounds = 0;      // of reductions that this rank has begun, if it waits for others to begin them too
  int32_t writes = 0;      // to sharded parameters, not yet in the shards; -1: not known now
  int64_t launched = 0;    // reductions that this rank has ever begun, where work of a device may wait for them
  std::array<int32_t, kMaxUnits> units{};

  bool full() const { return num_needs + num_wishes == kMaxUnits; }
  std::span<const int32_t> needs() const { return {units.data(), static_cast<size_t>(num_needs)}; }
  std::span<const int32_t> wishes() const { return {units.data() + num_needs, static_cast<size_t>(num_wishes)}; }
  std::span<const int32_t> all() const { return {units.data(), static_cast<size_t>(num_needs + num_wishes)}; }
};

/// A rank has entered a collective method: it needs no more units and serves until all ranks have closed.
struct Close {
  Call call = Call::step;
  bool boundary = false;      // end of the accumulation, by this rank's count
  bool joined = false;        // this rank has no more batches
  bool has_gradient = false;  // backward gave this rank something not yet reduced
  bool has_written = false;   // this rank's program wrote into its private view of shared parameters
  bool failed = false;        // this rank cannot take part: it throws, and so do the others
  bool asked_to_go = false;   // this rank got a signal to save and end
  bool in_handler = false;    // of an exception, in which this rank saves
  int64_t rounds = 0;         // of reductions: required by a step, started before anything drops gradients
  int32_t writes = 0;         // as in Wishes
  int64_t launched = 0;       // likewise
  int32_t save = 0;           // how far this rank is with a save beside training: checkpoint::SavePhase
  uint64_t changes = 0;       // a digest of how the model's parameters differ from those bound at initialize
  int32_t num_ahead = 0;      // of the units with which this rank expects its next pass to begin
  std::array<int32_t, Wishes::kMaxUnits> units_ahead{};

  std::span<const int32_t> ahead() const { return {units_ahead.data(), static_cast<size_t>(num_ahead)}; }
};

/// One rank's part of a round.
using Word = std::variant<Wishes, Close>;

/// A rank's knowledge about its shards of the gradients.
struct Verdict {
  double squares = 0.0;        // not finite if any element is not
  int32_t bad_unit = -1;       // by Unit::index(); -1: no element is bad here
  int32_t bad_parameter = -1;  // in that unit
  /// The contributor; none: every contribution was finite, their sum was not.
  world::WorldRank bad_rank = world::WorldRank::none;
  bool has_seen_all = false;        // this rank's backward reached every trained parameter
  uint64_t hyperparameters = 0;     // a digest of what this rank would step with
  numerics::QuantizationLoss lost;  // by this rank's gradients on their way
  LinkFacts links;
  StepTimes times;  // of the last step, if the configuration asks for a breakdown
  double loss = std::numeric_limits<double>::quiet_NaN();  // mean of this rank's losses, if somebody asks
};

/// The first rank's name for a save, and what a rank was asked to save: other saves of the same tag have other names.
struct SaveName {
  uint64_t nonce = 0;
  bool exclude_frozen = false;
  bool blocking = true;
  SaveContents contents = SaveContents::all;
  bool within = false;  // an accumulation, on this rank
  int64_t global_steps = 0;
};

/// Whether a rank could do its part, and a digest of what it saw.
struct Vote {
  bool failed = false;
  uint64_t digest = 0;  // equal on ranks that saw the same
};

}  // namespace deeptide::comm
