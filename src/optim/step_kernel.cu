// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One thread per element. A rule's arithmetic is its vector code's, on single numbers.
#include "numerics/kernel_launch.h"
#include "numerics/kernel_numbers.h"
#include "optim/single_lane.h"
#include "optim/step_kernel.h"

namespace deeptide::optim::DEEPTIDE_KERNELS {
namespace {

using namespace single;  // NOLINT: V, D and hn, as the rules name them
using numerics::kernel::Numbers;
using numerics::kernel::Rows;

#include "optim/adagrad_update.inl"
#include "optim/adam_update.inl"
#include "optim/lion_update.inl"
#include "optim/rmsprop_update.inl"
#include "optim/sgd_update.inl"

/// One element's step. `kStates`: how many states it reads and writes.
template <int kStates, typename Update>
struct StepBody {
  DEEPTIDE_HOST_DEVICE V updated(V p, V g, V* states) const {
    if constexpr (kStates == 0) {
      return update(p, g);
    } else if constexpr (kStates == 1) {
      return update(p, g, states[0]);
    } else if constexpr (kStates == 2) {
      return update(p, g, states[0], states[1]);
    } else {
      return update(p, g, states[0], states[1], states[2]);
    }
  }

  DEEPTIDE_HOST_DEVICE void operator()(int64_t i) const {
    namespace kernel = numerics::kernel;
    const uint32_t master_bits = kernel::load_bits(master.data, master.type, i);
    uint32_t bits[kStates + 1];
    for (int k = 0; k < kStates; ++k) bits[k] = kernel::load_bits(states[k].data, states[k].type, i);
    const V g = kernel::sum_of(gradient, i) * gradient_scale;

    V values[kStates + 1];
    for (int k = 0; k < kStates; ++k) values[k] = kernel::value_of(bits[k], states[k].type);
    const V p = updated(kernel::value_of(master_bits, master.type), g, values);

    for (int k = 0; k < kStates; ++k) kernel::store(values[k], states[k], i);
    kernel::store(p, master, i);
    if (param.data != nullptr) kernel::store(p, param, i);
  }

  Update update;
  Rows gradient;
  float gradient_scale;
  Numbers master;
  Numbers states[kStates + 1];  // one more, for there is no array of none
  Numbers param;
};

struct Launch {
  /// With the states that are kept, in the order of their roles, as the updates take them.
  template <int kStates, typename Update>
  void run(const Update& update) const {
    StepBody<kStates, Update> body{update, all.gradient, all.gradient_scale, all.master, {}, all.param};
    int kept = 0;
    for (const Numbers& state : all.states) {
      if (state.data != nullptr) body.states[kept++] = state;
    }
    numerics::kernel::launch_each(stream, all.count, body);
  }

  void operator()(const AdamScalars& s) const {
    s.l2_decay != 0.0f ? run<2>(AdamUpdate<true>{s}) : run<2>(AdamUpdate<false>{s});
  }
  void operator()(const AdagradScalars& s) const { run<1>(AdagradUpdate{s}); }
  void operator()(const LionScalars& s) const { run<1>(LionUpdate{s}); }
  void operator()(const SgdScalars& s) const {
    all.states[0].data != nullptr ? run<1>(SgdUpdate{s}) : run<0>(SgdUpdate{s});
  }
  void operator()(const RmspropScalars& s) const {
    const bool centered = all.states[1].data != nullptr, moves = all.states[2].data != nullptr;
    if (centered) {
      moves ? run<3>(RmspropCentered{{s}}) : run<2>(RmspropCentered{{s}});
    } else {
      moves ? run<2>(RmspropPlain{{s}}) : run<1>(RmspropPlain{{s}});
    }
  }

  const StepArguments& all;
  void* stream;
};

}  // namespace

bool has_step() { return numerics::kernel::is_runnable<StepBody<1, LionUpdate>>(); }

void step(const StepArguments& arguments, void* stream) { std::visit(Launch{arguments, stream}, arguments.update); }

}  // namespace deeptide::optim::DEEPTIDE_KERNELS
