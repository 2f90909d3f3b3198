// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A reduction for transports that only move bytes.
#pragma once

#include <ATen/core/Tensor.h>

namespace deeptide::comm {

/// output = rows[0] + rows[1] + …, in that order, in fp32 where the type is narrower. Shapes: (N,) each, at least one
/// row; `output` overlaps none but perhaps the first.
void add_rows_in_order(at::TensorList rows, at::Tensor output);

}  // namespace deeptide::comm
