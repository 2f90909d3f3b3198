// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The states of an optimizer that the caller brings, as pieces of a checkpoint.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/load/reader.h"
#include "checkpoint/save/piece.h"
#include "engine/design/topology.h"
#include "zero/steps/custom_steps.h"

namespace deeptide::engine {

/// The pieces that this rank saves: elements that it owns; whole values come from the owner of the parameter's first.
std::vector<checkpoint::Piece> custom_pieces(const Topology& topology, const zero::CustomSteps& custom);

/// The same states on their way back: every one that the checkpoint has, also if the optimizer has not stepped yet.
class CustomLoad {
 public:
  CustomLoad() = default;
  CustomLoad(const Topology& topology, const checkpoint::Reader& reader, zero::CustomSteps& custom);

  /// To be read, before `apply`.
  const std::vector<checkpoint::Piece>& wanted() const { return wanted_; }
  /// Gives the optimizer what was read, in the place of what it has.
  void apply();

 private:
  zero::CustomSteps* custom_ = nullptr;
  std::vector<checkpoint::Piece> wanted_;
  std::vector<std::vector<PartState>> states_;  // by part
};

}  // namespace deeptide::engine
