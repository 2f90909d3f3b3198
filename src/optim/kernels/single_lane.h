// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Highway's operations on one number, so that kernels take the arithmetic of the rules from the same text as vectors.
// Each rounds once, as IEEE 754 has it: with the compiler's own contraction off, the results are a vector's.
#pragma once

#include <cmath>

#include "numerics/kernels/kernel_launch.h"

namespace deeptide::optim::single {

using V = float;
struct D {};

namespace hn {

DEEPTIDE_HOST_DEVICE V Set(D /*d*/, float x) { return x; }
DEEPTIDE_HOST_DEVICE V Zero(D /*d*/) { return 0.0f; }
DEEPTIDE_HOST_DEVICE V Add(V a, V b) { return a + b; }
DEEPTIDE_HOST_DEVICE V Sub(V a, V b) { return a - b; }
DEEPTIDE_HOST_DEVICE V Mul(V a, V b) { return a * b; }
DEEPTIDE_HOST_DEVICE V Div(V a, V b) { return a / b; }
DEEPTIDE_HOST_DEVICE V Sqrt(V a) { return sqrtf(a); }
DEEPTIDE_HOST_DEVICE V MulAdd(V a, V b, V c) { return fmaf(a, b, c); }
DEEPTIDE_HOST_DEVICE V NegMulAdd(V a, V b, V c) { return fmaf(-a, b, c); }
DEEPTIDE_HOST_DEVICE V Abs(V a) { return fabsf(a); }
DEEPTIDE_HOST_DEVICE V CopySign(V size, V sign) { return copysignf(size, sign); }
DEEPTIDE_HOST_DEVICE bool Gt(V a, V b) { return a > b; }
DEEPTIDE_HOST_DEVICE bool Eq(V a, V b) { return a == b; }
DEEPTIDE_HOST_DEVICE V IfThenElse(bool condition, V a, V b) { return condition ? a : b; }

}  // namespace hn

#include "optim/updates/lerp.inl"

}  // namespace deeptide::optim::single
