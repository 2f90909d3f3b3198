// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Whole reduced gradients in `.grad`, from the end of a step's last backward until step(): the program may read and
// change them ("keep_grad").
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device/memory/memory.h"
#include "engine/bind/channels.h"
#include "engine/step/boundary.h"
#include "gradients/reducer.h"
#include "sharding/unit.h"

namespace deeptide::engine {

class KeptGradients {
 public:
  /// `trainable`: by position, as the reducer has them. Allocates one flat copy of their gradients, in their types.
  KeptGradients(std::vector<sharding::Unit*> trainable, gradients::Reducer& reducer, Channels& channels,
                const std::shared_ptr<device::Ledger>& ledger, at::Device device);

  /// The reducer's gradients are multiplied by `scale`; those in `.grad` are not.
  void set_loss_scale(double scale) { loss_scale_ = scale; }
  /// Whether `.grad` holds them.
  bool shown() const;
  /// Whether it did since gradients were last used or dropped. The same on all ranks.
  bool were_shown() const { return were_shown_; }
  /// Collective, once the reducer has finished. Sets `.grad` of each parameter that has a gradient on any rank.
  void show(Boundary& boundary);
  /// Collective. Compares what the programs did to `.grad`; if not every rank shows them, none does afterwards.
  /// Errors: ValueError on every rank, naming a parameter that was changed or set to None on some ranks only.
  void agree(Boundary& boundary);
  /// Brings what the program did to `.grad` into this rank's shards.
  void absorb();
  /// Likewise before ranks can agree: backward is about to add to `.grad`, which is None afterwards.
  void take_back();
  /// Sets `.grad` to None, whatever the program did to it: the gradients are dropped.
  void forget();

  int64_t predicted_bytes() const;
  /// Bytes that this rank has sent to the others so far, to make gradients whole.
  int64_t sent_bytes() const { return sent_bytes_; }

 private:
  /// A program's change to a parameter's `.grad`. Travels between ranks: kUntouched, kDropped (it is None), or the
  /// digest of the new values.
  using Change = uint64_t;
  static constexpr Change kUntouched = 0, kDropped = 1;
  /// One tensor of a parameter, and its `.grad` as it was shown.
  struct Place {
    at::Tensor tensor;
    at::Tensor gradient;  // undefined: no rank had one
  };
  struct Kept {
    int unit = 0;  // among the trainable ones
    int parameter = 0;
    std::vector<Place> places;
    uint64_t digest = 0;         // of what was shown
    Change change = kUntouched;  // that the shards have already, since ranks last agreed
  };

  const sharding::Parameter& parameter(const Kept& kept) const {
    return units_[static_cast<size_t>(kept.unit)]->parameters()[static_cast<size_t>(kept.parameter)];
  }
  void gather(int unit);
  void set(Kept& kept);
  size_t rank_alike(const Kept& kept, size_t rank) const;
  [[noreturn]] void refuse(const Kept& kept, std::pair<Change, size_t> first, std::pair<Change, size_t> other) const;
  at::Tensor flat(const Kept& kept) const;
  Change look(const Kept& kept) const;
  void absorb_one(Kept& kept, Change change);
  void hide();

  std::vector<sharding::Unit*> units_;
  gradients::Reducer& reducer_;
  Channels& channels_;
  std::vector<at::Tensor> whole_;  // by unit: (numel,), of the parameters' type
  double loss_scale_ = 1.0;

  mutable std::mutex mutex_;  // hooks run on autograd's threads
  std::vector<Kept> all_;
  bool shown_ = false;
  bool were_shown_ = false;
  int64_t sent_bytes_ = 0;
};

}  // namespace deeptide::engine
