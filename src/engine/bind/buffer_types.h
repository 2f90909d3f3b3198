// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The types of a model's buffers: each keeps its own, unless the configuration or the model asks for another.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "deeptide/engine.h"

namespace deeptide::engine {

class KeepsFullPrecision;

/// The types that "data_types" gives buffers of a model that computes in 16 bits.
struct BufferTypes {
  std::optional<at::ScalarType> asked;              // "buffer_dtype"; absent: each keeps its own
  std::optional<std::vector<std::string>> in_fp32;  // "keep_in_fp32_modules"; absent: as the model's classes say
};
BufferTypes buffer_types_of(const PrecisionConfig& precision);

struct BufferCounts {
  std::vector<std::string> in_fp32;  // names of those that the program's own code reads as fp32
  int cast = 0;                      // to the type that was asked for
};

/// Whether `pattern` occurs in the name of a buffer of that module or below it; "*" stands for any characters.
bool occurs_in(const Fp32Pattern& pattern, const std::string& name);

/// Casts the floating buffers of a model that computes in `compute`, in place: those named for fp32 to fp32, others to
/// the type that was asked for. Statistics stay with the norm that keeps them. Does nothing if `compute` is fp32.
BufferCounts cast_buffers(const ModelDescription& model, at::ScalarType compute, const BufferTypes& types,
                          const KeepsFullPrecision& keeps);

}  // namespace deeptide::engine
