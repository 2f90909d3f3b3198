// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The products of each operator, from its inputs' shapes.
#pragma once

#include <cstdint>
#include <string_view>

namespace at {
struct RecordFunction;
}

namespace deeptide::report {

/// Multiply-accumulates of an operator with these inputs; 0 of one that has no products.
int64_t macs_of(const at::RecordFunction& function);

/// Whether an operator that neither has a formula here nor calls one that has may still multiply: a factorization, a
/// transform, a lookup that sums, or one of another library.
bool may_multiply(std::string_view name);

}  // namespace deeptide::report
