// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Saves and loads the errors that rounding has left of each rank's gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "checkpoint/load/reader.h"
#include "checkpoint/save/piece.h"
#include "engine/bind/bound_model.h"
#include "engine/bind/channels.h"

namespace deeptide::engine {

/// The pieces of this rank. `errors`: Reducer::rounding_errors. `own`: this rank's place on the mesh.
std::vector<checkpoint::Piece> rounding_error_pieces(const BoundModel& model, const std::vector<at::Tensor>& errors,
                                                     const checkpoint::Coordinates& own);

/// Reads them back into memory of its own, then into place. What another number of ranks saved is not taken: errors
/// start at zero then, as they do where none were saved.
class RoundingErrorLoad {
 public:
  RoundingErrorLoad() = default;
  /// Adds to `wanted` what is to be read.
  RoundingErrorLoad(const checkpoint::Reader& reader, const BoundModel& model, const std::vector<at::Tensor>& errors,
                    Channels& channels, std::vector<checkpoint::Piece>& wanted);
  /// Overwrites the errors: after what was read, once no reduction is under way.
  void apply(const std::vector<at::Tensor>& errors) const;

 private:
  std::vector<at::Tensor> staged_;  // by unit; empty: zeros
};

}  // namespace deeptide::engine
