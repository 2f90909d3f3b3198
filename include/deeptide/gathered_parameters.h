// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Parameters whole for a while, and micro-batches that reduce nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "deeptide/engine.h"

namespace deeptide {

/// Collective at both ends. While it lives, the parameters are whole on every rank and may be read and written without
/// any other rank; the engine takes no step. `source`: the rank whose values all ranks have afterwards; without it what
/// was written is dropped where parameters are sharded. All ranks name the same parameters in the same order.
class DEEPTIDE_API GatheredParameters {
 public:
  /// Errors: ValueError if `source` is no rank; CommError.
  GatheredParameters(Engine& engine, std::vector<at::Tensor> parameters, std::optional<int> source = {});
  /// Does as end(), but logs its errors. Where an exception leaves the scope, other ranks are not waited for, and
  /// writes are dropped.
  ~GatheredParameters();
  GatheredParameters(const GatheredParameters&) = delete;
  GatheredParameters& operator=(const GatheredParameters&) = delete;

  /// Gives the parameters their memory back, once. Errors: CommError.
  void end();

 private:
  std::vector<at::Tensor> take_back();

  Engine& engine_;
  std::vector<at::Tensor> parameters_, own_;  // own_: undefined where the parameter kept its memory
  std::optional<int> source_;
  int exceptions_;
};

/// While it lives, nothing is reduced over the ranks: every Engine::step() only ends a micro-batch. Afterwards the
/// configuration says again where a step is taken. Does not nest.
class DEEPTIDE_API NoSync {
 public:
  /// Errors: ValueError from ZeRO stage 2 on, which shards the gradients and must reduce each of them.
  explicit NoSync(Engine& engine);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  Engine& engine_;
};

}  // namespace deeptide
