// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Describes each piece by its address, its first element and their number.
#include "numerics/sums/kernel_pieces.h"

#include <algorithm>

#include "base/invariant.h"

namespace deeptide::numerics {

bool fit_kernels(const Contributions& contributions) {
  if (contributions.pieces.size() > static_cast<size_t>(kernel::Pieces::kMost)) return false;
  return std::all_of(contributions.pieces.begin(), contributions.pieces.end(), [](const Piece& piece) {
    return piece.begin % kernel::kPacket == 0 && kernel::is_aligned(piece.values.const_data_ptr());
  });
}

kernel::Pieces pieces_of(const Contributions& contributions) {
  DEEPTIDE_INVARIANT(fit_kernels(contributions), "a kernel is given ", contributions.pieces.size(),
                     " pieces of a gradient that do not fit it");
  kernel::Pieces made;
  for (const Piece& piece : contributions.pieces) {
    made.data[made.pieces] = piece.values.const_data_ptr();
    made.begin[made.pieces] = piece.begin;
    made.count[made.pieces++] = piece.values.numel();
  }
  made.type = read_numbers_of(contributions.pieces[0].values).type;
  made.scale = static_cast<float>(contributions.scale);
  return made;
}

}  // namespace deeptide::numerics
