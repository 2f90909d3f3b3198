// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Converts floating elements between types, rounding to nearest even as torch does, without torch's libraries.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace deeptide::checkpoint {

/// Whether convert() takes this type: fp64, fp32, fp16, bf16.
bool is_floating(c10::ScalarType dtype);

/// Converts `count` elements at `from` to elements of type `to`. Both types are floating; `out` holds them.
void convert(c10::ScalarType from_type, const char* from, c10::ScalarType to_type, char* out, int64_t count);

/// `count` elements of any type that checkpoints have, as doubles; of a complex one each part.
void to_doubles(c10::ScalarType type, const char* from, int64_t count, std::vector<double>& out);

}  // namespace deeptide::checkpoint
