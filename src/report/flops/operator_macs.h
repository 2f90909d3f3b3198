// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The products of each operator, from its inputs' shapes.
#pragma once

#include <cstdint>

namespace at {
struct RecordFunction;
}

namespace deeptide::report {

/// Multiply-accumulates of an operator with these inputs; 0 of one that has no products.
int64_t macs_of(const at::RecordFunction& function);

}  // namespace deeptide::report
