// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A reduction for transports that only move bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/transport/transport.h"

namespace deeptide::comm {

/// Computes output = rows[0] + rows[1] + …, in that order, in fp32 where the type is narrower. Shapes: (N,) each, at
/// least one row. `output` may overlap the first row only.
void add_rows_in_order(at::TensorList rows, at::Tensor output);

/// Reduces over a transport that only moves bytes: an all-to-all, then sums in rank order. Shapes: as
/// Transport::reduce_scatter.
OperationPtr reduce_scatter_in_order(Transport& transport, int64_t num_ranks, at::Tensor output, at::Tensor input);

}  // namespace deeptide::comm
