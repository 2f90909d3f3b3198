// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A segment as streams of memory for elementwise rules on the CPU, and what their references share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>

#include "numerics/rounding/packed.h"
#include "numerics/rounding/stochastic_rounding.h"
#include "optim/rules/rule.h"

namespace deeptide::optim::detail {

inline constexpr size_t kMaxStates = 3;

enum class Output : uint8_t { none, bf16, fp16 };

/// How a gradient arrives: summed, in fp32, or as one or two rows of bf16 that are summed as they are read.
enum class Source : uint8_t { summed, one_bf16, two_bf16 };

struct GradientStreams {
  const void* rows[2];
  float row_scale;  // of the rows' sum; 1 when summed
  float scale;      // the step's own
  Source source;
};

/// The destination of the rounded master. Large outputs go past the cache: they are not read before the whole model has
/// been written, and a line that is not cached need not be read to be written.
struct ParamStream {
  void* data;
  Output output;
  bool past_cache;
};

/// A segment's streams from some element on; a state that is not kept is null.
struct Streams {
  float* master;  // null if it is packed
  float* states[kMaxStates];
  GradientStreams gradient;
  ParamStream param;
  numerics::PackedRange packed = {};
  uint16_t* half_states[kMaxStates] = {};  // in bf16, in the place of `states`; only beside a packed master
  numerics::RandomKey random = {};         // for these: a stream each, by their places
  int64_t index = 0;                       // of the first element there

  bool keeps(size_t state) const { return states[state] != nullptr || half_states[state] != nullptr; }
};

/// The segment's streams from element `begin` on, without its gradient.
Streams streams_from(const Segment& segment, int64_t begin);

/// Calls `kernel(streams, count)` for ranges that cover the segment, on torch's threads.
void over_streams(const Segment& segment, const StepTerms& terms,
                  c10::function_ref<void(const Streams& streams, size_t count)> kernel);

/// The same without a gradient: for a second pass.
void over_states(const Segment& segment, c10::function_ref<void(const Streams& streams, size_t count)> kernel);

/// Calls `visit(begin, count, gradient)` for blocks of at most numerics::SumReader::kBlock elements that cover the
/// segment, on torch's threads: the sum from element `begin` on, not scaled yet. Blocks of one PieceSquares block, of
/// whose range the segment begins at `first`, come in ascending order and on one thread.
void over_blocks(const Segment& segment, int64_t first,
                 c10::function_ref<void(int64_t begin, int64_t count, const float* gradient)> visit);

/// The gradient's sum times the step's scale, plus `l2_decay` times the master: a new tensor.
at::Tensor scaled_gradient(const Segment& segment, const StepTerms& terms, float l2_decay);

}  // namespace deeptide::optim::detail
