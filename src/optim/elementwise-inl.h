// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One pass of an elementwise rule's update over streams, as vector code; included once per instruction set.
#if defined(DEEPTIDE_OPTIM_ELEMENTWISE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef DEEPTIDE_OPTIM_ELEMENTWISE_INL_H
#undef DEEPTIDE_OPTIM_ELEMENTWISE_INL_H
#else
#define DEEPTIDE_OPTIM_ELEMENTWISE_INL_H
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <type_traits>

#include "numerics/float_vectors-inl.h"
#include "optim/elementwise.h"

HWY_BEFORE_NAMESPACE();
namespace deeptide::optim::HWY_NAMESPACE {
using namespace numerics::HWY_NAMESPACE;

using detail::Output;
using detail::Source;
using detail::Streams;

/// torch's lerp: from the nearer end, so that weights 0 and 1 are exact.
HWY_INLINE V lerp(V from, V to, float weight) {
  const bool near_from = weight < 0.5f;
  const V factor = hn::Set(D(), near_from ? weight : weight - 1.0f);
  return hn::MulAdd(factor, hn::Sub(to, from), near_from ? from : to);
}

template <Source kSource, typename InMemory>
HWY_INLINE V load_gradient(InMemory part, const detail::GradientStreams& gradient, size_t i) {
  if constexpr (kSource == Source::summed) {
    return part.get(static_cast<const float*>(gradient.rows[0]) + i);
  } else {
    constexpr int kRows = kSource == Source::two_bf16 ? 2 : 1;
    const c10::BFloat16* from[] = {static_cast<const c10::BFloat16*>(gradient.rows[0]),
                                   static_cast<const c10::BFloat16*>(gradient.rows[1])};
    return hn::Mul(add_rows<kRows, false>(part, from, nullptr, i), hn::Set(D(), gradient.row_scale));
  }
}

template <Output kOutput, typename InMemory>
HWY_INLINE void store_param(InMemory part, V x, const detail::ParamStream& param, size_t i) {
  if constexpr (kOutput == Output::fp16) part.put(x, static_cast<c10::Half*>(param.data) + i);
  if constexpr (kOutput == Output::bf16) {
    auto* to = static_cast<c10::BFloat16*>(param.data) + i;
    if constexpr (std::is_same_v<InMemory, Whole>) {
      param.past_cache ? stream(x, to) : store(x, to);
    } else {
      part.put(x, to);
    }
  }
}

template <size_t kStates, Output kOutput, Source kSource, typename InMemory, typename Update>
HWY_INLINE void step_vector(InMemory part, const Streams& io, size_t i, const Update& update) {
  V p = part.get(io.master + i);
  const V g = hn::Mul(load_gradient<kSource>(part, io.gradient, i), hn::Set(D(), io.gradient.scale));
  if constexpr (kStates == 0) {
    p = update(p, g);
  } else if constexpr (kStates == 1) {
    V state = part.get(io.states[0] + i);
    p = update(p, g, state);
    part.put(state, io.states[0] + i);
  } else if constexpr (kStates == 2) {
    V first = part.get(io.states[0] + i), second = part.get(io.states[1] + i);
    p = update(p, g, first, second);
    part.put(first, io.states[0] + i);
    part.put(second, io.states[1] + i);
  } else {
    static_assert(kStates == 3, "add a case for more states");
    V first = part.get(io.states[0] + i), second = part.get(io.states[1] + i), third = part.get(io.states[2] + i);
    p = update(p, g, first, second, third);
    part.put(first, io.states[0] + i);
    part.put(second, io.states[1] + i);
    part.put(third, io.states[2] + i);
  }
  part.put(p, io.master + i);
  store_param<kOutput>(part, p, io.param, i);
}

/// Copies of `io` and `update` stay in registers: the stores cannot change them.
template <size_t kStates, Output kOutput, Source kSource, typename Update>
void step_range(Streams io, size_t count, Update update) {
  each_vector(0, count, [&](auto part, size_t i) { step_vector<kStates, kOutput, kSource>(part, io, i, update); });
}

/// One step of `count` elements. `update(p, g, state...)`: from a vector of parameters, of scaled gradients and of each
/// of the kStates states, which it updates in place, to the new parameters.
template <size_t kStates, typename Update>
HWY_INLINE void step_streams(const Streams& io, size_t count, const Update& update) {
  if (io.gradient.source == Source::one_bf16) {
    step_range<kStates, Output::bf16, Source::one_bf16>(io, count, update);
  } else if (io.gradient.source == Source::two_bf16) {
    step_range<kStates, Output::bf16, Source::two_bf16>(io, count, update);
  } else if (io.param.output == Output::none) {
    step_range<kStates, Output::none, Source::summed>(io, count, update);
  } else if (io.param.output == Output::bf16) {
    step_range<kStates, Output::bf16, Source::summed>(io, count, update);
  } else {
    step_range<kStates, Output::fp16, Source::summed>(io, count, update);
  }
  // What went past the cache is visible to other threads before they hear of the step.
  if (io.param.past_cache) hwy::FlushStream();
}

template <Output kOutput, typename NewMaster>
void move_range(Streams io, size_t count, NewMaster new_master) {
  each_vector(0, count, [&](auto part, size_t i) {
    const V p = new_master(part, i);
    part.put(p, io.master + i);
    store_param<kOutput>(part, p, io.param, i);
  });
}

/// A second pass over `count` elements, which writes no state. `new_master(part, i)`: the vector of parameters from
/// element `i` on.
template <typename NewMaster>
HWY_INLINE void move_master(const Streams& io, size_t count, const NewMaster& new_master) {
  if (io.param.output == Output::none) {
    move_range<Output::none>(io, count, new_master);
  } else if (io.param.output == Output::bf16) {
    move_range<Output::bf16>(io, count, new_master);
  } else {
    move_range<Output::fp16>(io, count, new_master);
  }
  if (io.param.past_cache) hwy::FlushStream();
}

}  // namespace deeptide::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
