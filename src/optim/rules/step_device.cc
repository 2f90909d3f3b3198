// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Hands a segment's memory to the kernels of a step.
#include "optim/rules/step_device.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <iterator>

#include "base/invariant.h"
#include "numerics/kernels/kernel_tensors.h"
#include "numerics/rounding/stochastic_rounding.h"
#include "numerics/sums/kernel_pieces.h"

namespace deeptide::optim::detail {

namespace kernel = numerics::kernel;
using at::Tensor;
using kernel::Rows;

namespace {

constexpr numerics::Kernel<StepArguments> kStep{"step", &device_kernels::has_step, &device_kernels::step};

kernel::RandomBits random_bits(const StochasticRounding& rounding, int64_t step) {
  const auto key = numerics::RandomKey::of(rounding.seed, static_cast<uint64_t>(step));
  return {{key.first[0], key.first[1]}, {key.second[0], key.second[1]}, rounding.first};
}

/// All but the gradient and the random bits.
StepArguments of_states(const Segment& segment) {
  StepArguments made;
  made.master = numerics::numbers_of(segment.master);
  DEEPTIDE_INVARIANT(segment.states.size() <= StepArguments::kMostStates, "a rule has too many states for a kernel");
  for (size_t i = 0; i < segment.states.size(); ++i) made.states[i] = numerics::numbers_of(segment.states[i]);
  made.param = numerics::numbers_of(segment.param);
  made.count = segment.master.numel();
  if (segment.low.defined()) {
    made.low = segment.low.mutable_data_ptr();
    made.above = static_cast<uint8_t*>(segment.halfway->bits().mutable_data_ptr()) + segment.first / kernel::kPacket;
  }
  made.rounds = segment.rounding.has_value();
  return made;
}

/// Whether only packets take the master or its states.
bool needs_packets(const Segment& segment) { return segment.low.defined() || segment.rounding.has_value(); }

/// Whether packets can read the gradient as one row.
bool is_one_row(const numerics::Contributions& gradient) {
  return gradient.rows.size() == 1 && kernel::is_aligned(gradient.rows[0].const_data_ptr());
}

/// Whether the kernel reaches all of a packed master, and each byte of its bits is one packet's.
bool is_within_reach(const Segment& segment) {
  const auto is_there = [&](const at::Tensor& part) {
    return part.defined() && part.device() == segment.master.device();
  };
  if (!segment.low.defined()) return true;
  return segment.halfway != nullptr && is_there(segment.low) && is_there(segment.halfway->bits()) &&
         segment.first % kernel::kPacket == 0;
}

}  // namespace

bool has_step_kernel(const Segment& segment) {
  if (!segment.master.defined() || segment.gradient.rows.size() > Rows::kMost) return false;
  if (!kStep.is_on(segment.master.device()) || !is_within_reach(segment)) return false;
  return !needs_packets(segment) || of_states(segment).takes_packets(kernel::NumberType::fp32);
}

bool takes_gradient(const Segment& segment) {
  const numerics::Contributions& gradient = segment.gradient;
  if (!gradient.pieces.empty()) {
    return numerics::fit_kernels(gradient) && of_states(segment).takes_packets(numerics::pieces_of(gradient).type);
  }
  if (!needs_packets(segment)) return true;
  const kernel::Numbers row = numerics::read_numbers_of(gradient.rows[0]);
  return is_one_row(gradient) && of_states(segment).takes_packets(row.type);
}

numerics::Contributions nearer_gradient(const numerics::Contributions& gradient) {
  if (!gradient.pieces.empty()) return gradient.joined();
  return gradient.is_summed() ? gradient.rows[0].clone() : gradient.sum();
}

StepArguments step_arguments(const Segment& segment, const StepTerms& terms, const UpdateScalars& update) {
  StepArguments made = of_states(segment);
  made.update = update;
  if (segment.gradient.pieces.empty()) {
    made.gradient = numerics::rows_of(segment.gradient.rows, static_cast<float>(segment.gradient.scale));
  } else {
    made.pieces = numerics::pieces_of(segment.gradient);
  }
  made.gradient_scale = static_cast<float>(terms.gradient_scale);
  if (segment.rounding) made.random = random_bits(*segment.rounding, terms.step);
  return made;
}

void step_by_kernel(const Segment& segment, const StepTerms& terms, const UpdateScalars& update) {
  kStep.run(segment.master.device(), step_arguments(segment, terms, update));
}

// -- LAMB
// --------------------------------------------------------------------------------------------------------------

namespace {

constexpr numerics::Kernel<LambArguments> kLamb{"lamb", &device_kernels::has_lamb, &device_kernels::lamb};

/// The gradient where one piece or more can be read in packets.
numerics::Contributions readable(numerics::Contributions gradient) {
  while (gradient.pieces.empty() ? !is_one_row(gradient) : !numerics::fit_kernels(gradient)) {
    gradient = nearer_gradient(gradient);
  }
  return gradient;
}

kernel::Pieces lamb_pieces(const numerics::Contributions& gradient, int64_t count) {
  if (!gradient.pieces.empty()) return numerics::pieces_of(gradient);
  return kernel::one_piece(numerics::rows_of(gradient.rows, static_cast<float>(gradient.scale)), count);
}

}  // namespace

bool has_lamb_kernel(const Segment& segment) {
  if (!kLamb.is_on(segment.master.device())) return false;
  const Tensor all[] = {segment.master, segment.states[0], segment.states[1], segment.param};
  return std::all_of(std::begin(all), std::end(all),
                     [](const Tensor& one) { return !one.defined() || kernel::is_aligned(one.const_data_ptr()); });
}

LambArguments lamb_arguments(const Segment& segment, const LambScalars& scalars, const Tensor& update) {
  LambArguments made;
  made.scalars = scalars;
  made.master = segment.master.mutable_data_ptr();
  made.exp_avg = segment.states[0].mutable_data_ptr();
  made.exp_avg_sq = segment.states[1].mutable_data_ptr();
  made.param = numerics::numbers_of(segment.param);
  made.count = segment.master.numel();
  if (!update.defined()) return made;
  made.gradient = lamb_pieces(segment.gradient, made.count);
  made.update = update.mutable_data_ptr();
  return made;
}

void lamb_measure_by_kernel(const Segment& segment, const LambScalars& scalars, int64_t first, NormSums& sums) {
  Segment own = segment;
  own.gradient = readable(segment.gradient);
  const Tensor update = at::empty_like(segment.master);
  kLamb.run(segment.master.device(), lamb_arguments(own, scalars, update));
  sums.param.add(first, segment.master);
  sums.update.add(first, update);
}

void lamb_apply_by_kernel(const Segment& segment, const LambScalars& scalars) {
  kLamb.run(segment.master.device(), lamb_arguments(segment, scalars, {}));
}

}  // namespace deeptide::optim::detail
