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

#include "numerics/rounding/float_vectors-inl.h"
#include "numerics/rounding/packed_vectors-inl.h"
#include "numerics/rounding/stochastic_rounding-inl.h"
#include "optim/rules/elementwise.h"

/// Marks the arithmetic that kernels share.
#undef DEEPTIDE_HOST_DEVICE
#define DEEPTIDE_HOST_DEVICE HWY_INLINE

HWY_BEFORE_NAMESPACE();
namespace deeptide::optim::HWY_NAMESPACE {
using namespace numerics::HWY_NAMESPACE;

using detail::Output;
using detail::Source;
using detail::Streams;

#include "optim/updates/lerp.inl"

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

template <Source kSource>
HWY_INLINE void fetch_gradient(const detail::GradientStreams& gradient, size_t i) {
  using T = std::conditional_t<kSource == Source::summed, float, c10::BFloat16>;
  fetch_ahead(static_cast<const T*>(gradient.rows[0]) + i);
  if constexpr (kSource == Source::two_bf16) fetch_ahead(static_cast<const T*>(gradient.rows[1]) + i);
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

/// The streams of a step in fp32: a master with its states, and its parameter rounded.
template <Output kOutput>
struct WideForm {
  HWY_INLINE void fetch_master(size_t i) const { fetch_ahead(io.master + i); }
  HWY_INLINE void fetch_state(size_t k, size_t i) const { fetch_ahead(io.states[k] + i); }
  template <typename InMemory>
  HWY_INLINE V master(InMemory part, size_t i) const {
    return part.get(io.master + i);
  }
  template <typename InMemory>
  HWY_INLINE void put_master(InMemory part, V p, size_t i) const {
    part.put(p, io.master + i);
    store_param<kOutput>(part, p, io.param, i);
  }
  template <typename InMemory>
  HWY_INLINE V state(InMemory part, size_t k, size_t i) const {
    return part.get(io.states[k] + i);
  }
  template <typename InMemory>
  HWY_INLINE void put_states(InMemory part, size_t i, V first) const {
    part.put(first, io.states[0] + i);
  }
  template <typename InMemory>
  HWY_INLINE void put_states(InMemory part, size_t i, V first, V second) const {
    put_states(part, i, first);
    part.put(second, io.states[1] + i);
  }
  template <typename InMemory>
  HWY_INLINE void put_states(InMemory part, size_t i, V first, V second, V third) const {
    put_states(part, i, first, second);
    part.put(third, io.states[2] + i);
  }
  Streams io;
};

/// A packed master, with fp32 states.
struct PackedForm : WideForm<Output::none> {
  HWY_INLINE void fetch_master(size_t i) const {
    fetch_ahead(io.packed.high + i);
    fetch_ahead(io.packed.low + i);
  }
  template <typename InMemory>
  HWY_INLINE V master(InMemory part, size_t i) const {
    return load_packed(part, io.packed, i);
  }
  template <typename InMemory>
  HWY_INLINE void put_master(InMemory part, V p, size_t i) const {
    store_packed(part, p, io.packed, i);
  }
};

/// A packed master, with states in bf16 that are rounded stochastically.
struct PackedHalfForm : PackedForm {
  HWY_INLINE void fetch_state(size_t k, size_t i) const { fetch_ahead(io.half_states[k] + i); }
  template <typename InMemory>
  HWY_INLINE V state(InMemory part, size_t k, size_t i) const {
    return part.get(reinterpret_cast<const c10::BFloat16*>(io.half_states[k]) + i);
  }
  HWY_INLINE U random(int pair, size_t i) const {
    return random_bits(io.random, pair, io.index + static_cast<int64_t>(i));
  }
  template <typename InMemory>
  HWY_INLINE void put_state(InMemory part, size_t i, V x, int k, U random) const {
    part.put_bits(rounded_by(x, bits_of_stream(random, k)), io.half_states[k] + i);
  }
  template <typename InMemory>
  HWY_INLINE void put_states(InMemory part, size_t i, V first) const {
    put_state(part, i, first, 0, random(0, i));
  }
  template <typename InMemory>
  HWY_INLINE void put_states(InMemory part, size_t i, V first, V second) const {
    const U bits = random(0, i);
    put_state(part, i, first, 0, bits);
    put_state(part, i, second, 1, bits);
  }
  template <typename InMemory>
  HWY_INLINE void put_states(InMemory part, size_t i, V first, V second, V third) const {
    put_states(part, i, first, second);
    put_state(part, i, third, 2, random(1, i));
  }
};

template <size_t kStates, Source kSource, typename InMemory, typename Form, typename Update>
HWY_INLINE void step_vector(InMemory part, const Form& form, size_t i, const Update& update) {
  const Streams& io = form.io;
  V p = form.master(part, i);
  const V g = hn::Mul(load_gradient<kSource>(part, io.gradient, i), hn::Set(D(), io.gradient.scale));
  if constexpr (kStates == 0) {
    p = update(p, g);
  } else if constexpr (kStates == 1) {
    V state = form.state(part, 0, i);
    p = update(p, g, state);
    form.put_states(part, i, state);
  } else if constexpr (kStates == 2) {
    V first = form.state(part, 0, i), second = form.state(part, 1, i);
    p = update(p, g, first, second);
    form.put_states(part, i, first, second);
  } else {
    static_assert(kStates == 3, "add a case for more states");
    V first = form.state(part, 0, i), second = form.state(part, 1, i), third = form.state(part, 2, i);
    p = update(p, g, first, second, third);
    form.put_states(part, i, first, second, third);
  }
  form.put_master(part, p, i);
}

template <size_t kStates, Source kSource, typename Form>
HWY_INLINE void fetch_vector(const Form& form, size_t i) {
  form.fetch_master(i);
  fetch_gradient<kSource>(form.io.gradient, i);
  for (size_t k = 0; k < kStates; ++k) form.fetch_state(k, i);
}

/// Copies of `form` and `update` stay in registers: the stores cannot change them.
template <size_t kStates, Source kSource, typename Form, typename Update>
void step_range(Form form, size_t count, Update update) {
  each_vector(0, count, [&](auto part, size_t i) {
    fetch_vector<kStates, kSource>(form, i);
    step_vector<kStates, kSource>(part, form, i, update);
  });
}

template <size_t kStates, typename Form, typename Update>
HWY_INLINE void step_form(const Form& form, size_t count, const Update& update) {
  switch (form.io.gradient.source) {
    case Source::one_bf16:
      return step_range<kStates, Source::one_bf16>(form, count, update);
    case Source::two_bf16:
      return step_range<kStates, Source::two_bf16>(form, count, update);
    case Source::summed:
      return step_range<kStates, Source::summed>(form, count, update);
  }
}

template <size_t kStates, typename Update>
HWY_INLINE void step_packed(const Streams& io, size_t count, const Update& update) {
  if constexpr (kStates > 0) {
    if (io.half_states[0] != nullptr) return step_form<kStates>(PackedHalfForm{{{io}}}, count, update);
  }
  step_form<kStates>(PackedForm{{io}}, count, update);
}

/// One step of `count` elements. `update(p, g, state...)`: from a vector of parameters, of scaled gradients and of each
/// of the kStates states, which it updates in place, to the new parameters.
template <size_t kStates, typename Update>
HWY_INLINE void step_streams(const Streams& io, size_t count, const Update& update) {
  if (io.packed.low != nullptr) return step_packed<kStates>(io, count, update);
  if (io.param.output == Output::none) {
    step_range<kStates, Source::summed>(WideForm<Output::none>{io}, count, update);
  } else if (io.param.output == Output::bf16) {
    step_form<kStates>(WideForm<Output::bf16>{io}, count, update);
  } else {
    step_range<kStates, Source::summed>(WideForm<Output::fp16>{io}, count, update);
  }
  // Stores past the cache become visible to other threads before they hear of the step.
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
