// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Eight elements per thread where types and addresses allow it, else one. A rule's arithmetic is its vector code's, on
// single numbers.
#include "numerics/kernels/kernel_launch.h"
#include "numerics/kernels/kernel_numbers.h"
#include "numerics/kernels/kernel_packets.h"
#include "numerics/kernels/kernel_rounding.h"
#include "optim/kernels/single_lane.h"
#include "optim/kernels/step_kernel.h"

namespace deeptide::optim::DEEPTIDE_KERNELS {
namespace {

using namespace single;  // NOLINT: V, D and hn, as the rules name them
using numerics::kernel::Numbers;
using numerics::kernel::NumberType;
using numerics::kernel::Rows;

#include "optim/updates/adagrad_update.inl"
#include "optim/updates/adam_update.inl"
#include "optim/updates/lion_update.inl"
#include "optim/updates/rmsprop_update.inl"
#include "optim/updates/sgd_update.inl"

/// Applies the rule to one element and its states, of which there are `kStates`.
template <int kStates, typename Update>
DEEPTIDE_HOST_DEVICE V updated(const Update& update, V p, V g, V* states) {
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

/// One element's step. `kStates`: how many states it reads and writes.
template <int kStates, typename Update>
struct StepBody {
  DEEPTIDE_HOST_DEVICE void operator()(int64_t i) const {
    namespace kernel = numerics::kernel;
    const uint32_t master_bits = kernel::load_bits(master.data, master.type, i);
    uint32_t bits[kStates + 1];
    for (int k = 0; k < kStates; ++k) bits[k] = kernel::load_bits(states[k].data, states[k].type, i);
    const V g = kernel::sum_of(gradient, i) * gradient_scale;

    V values[kStates + 1];
    for (int k = 0; k < kStates; ++k) values[k] = kernel::value_of(bits[k], states[k].type);
    const V p = updated<kStates>(update, kernel::value_of(master_bits, master.type), g, values);

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

/// One row.
struct OneRow {
  template <NumberType kType>
  DEEPTIDE_HOST_DEVICE auto reader() const {
    return numerics::kernel::RowReader<kType>{data};
  }

  const void* data;
  float scale;
};

/// Gradients where autograd left them.
struct InPieces {
  template <NumberType kType>
  DEEPTIDE_HOST_DEVICE auto reader() const {
    return numerics::kernel::PieceReader<kType>{pieces};
  }

  numerics::kernel::Pieces pieces;
  float scale;
};

/// Eight elements' steps: gradients in `kGradient`, masters and states in fp32, parameters in `kParam`; fp32: the
/// masters are the parameters.
template <int kStates, typename Update, NumberType kGradient, NumberType kParam, typename Gradient>
struct PacketBody {
  static constexpr bool kHasParam = kParam != NumberType::fp32;

  DEEPTIDE_HOST_DEVICE void operator()(int64_t i) const {
    namespace kernel = numerics::kernel;
    const int64_t first = i * kernel::kPacket;
    if (first + kernel::kPacket > count) return step_one_by_one(first);
    kernel::Packet<kGradient> gradients;
    kernel::Packet<NumberType::fp32> masters, kept[kStates + 1];
    kernel::Packet<kHasParam ? kParam : NumberType::bf16> params;
    auto reader = gradient.template reader<kGradient>();
    reader.load(gradients, i);
    masters.load(master, i);
    DEEPTIDE_UNROLLED for (int s = 0; s < kStates; ++s) kept[s].load(states[s], i);
    DEEPTIDE_UNROLLED for (int k = 0; k < kernel::kPacket; ++k) {
      V values[kStates + 1];
      DEEPTIDE_UNROLLED for (int s = 0; s < kStates; ++s) values[s] = kept[s].value(k);
      const V g = gradients.value(k) * gradient.scale * gradient_scale;
      const V p = updated<kStates>(update, masters.value(k), g, values);
      DEEPTIDE_UNROLLED for (int s = 0; s < kStates; ++s) kept[s].set(k, values[s]);
      masters.set(k, p);
      if constexpr (kHasParam) params.set(k, p);
    }
    DEEPTIDE_UNROLLED for (int s = 0; s < kStates; ++s) kept[s].store(states[s], i);
    masters.store(master, i);
    if constexpr (kHasParam) params.store(param, i);
  }

  /// The last ones, fewer than eight.
  DEEPTIDE_HOST_DEVICE void step_one_by_one(int64_t first) const {
    namespace kernel = numerics::kernel;
    auto reader = gradient.template reader<kGradient>();
    for (int64_t j = first; j < count; ++j) {
      V values[kStates + 1];
      DEEPTIDE_UNROLLED for (int s = 0; s < kStates; ++s) values[s] = static_cast<const float*>(states[s])[j];
      const V g = reader.value(j) * gradient.scale * gradient_scale;
      const V p = updated<kStates>(update, static_cast<const float*>(master)[j], g, values);
      DEEPTIDE_UNROLLED for (int s = 0; s < kStates; ++s) static_cast<float*>(states[s])[j] = values[s];
      static_cast<float*>(master)[j] = p;
      if constexpr (kHasParam) kernel::store(p, {param, kParam}, j);
    }
  }

  Update update;
  int64_t count;
  Gradient gradient;
  float gradient_scale;
  void* master;
  void* states[kStates + 1];
  void* param;
};

#include "optim/kernels/narrow_step.inl"

struct Launch {
  /// The memory of the states that are kept, in the order of their roles, as the updates take them.
  void put_states(void** states) const {
    for (const Numbers& state : all.states) {
      if (state.data != nullptr) *states++ = state.data;
    }
  }

  /// Whether packets may carry all of it: what training in bf16, fp16 and fp32 has at one rank, or after a sum.
  bool takes_packets() const {
    namespace kernel = numerics::kernel;
    return all.gradient.count == 1 && kernel::is_aligned(all.gradient.data[0]) && all.takes_packets(all.gradient.type);
  }

  template <int kStates, NumberType kGradient, NumberType kParam, typename Update>
  void run_packets(const Update& update) const {
    if (all.pieces.pieces > 0) {
      return run_packets_of<kStates, kGradient, kParam>(update, InPieces{all.pieces, all.pieces.scale});
    }
    run_packets_of<kStates, kGradient, kParam>(update, OneRow{all.gradient.data[0], all.gradient.scale});
  }

  template <int kStates, NumberType kGradient, NumberType kParam, typename Update, typename Gradient>
  void run_packets_of(const Update& update, const Gradient& gradient) const {
    namespace kernel = numerics::kernel;
    PacketBody<kStates, Update, kGradient, kParam, Gradient> body{
        update, all.count, gradient, all.gradient_scale, all.master.data, {}, all.param.data};
    put_states(body.states);
    kernel::launch_each(stream, (all.count + kernel::kPacket - 1) / kernel::kPacket, body);
  }

  /// For those that takes_packets() lets through.
  template <int kStates, typename Update>
  void run_packets(const Update& update) const {
    constexpr auto fp32 = NumberType::fp32, bf16 = NumberType::bf16, fp16 = NumberType::fp16;
    const bool sums = (all.pieces.pieces > 0 ? all.pieces.type : all.gradient.type) == fp32;
    if (all.param.data == nullptr) return run_packets<kStates, fp32, fp32>(update);
    if (all.param.type == bf16) {
      return sums ? run_packets<kStates, fp32, bf16>(update) : run_packets<kStates, bf16, bf16>(update);
    }
    return sums ? run_packets<kStates, fp32, fp16>(update) : run_packets<kStates, fp16, fp16>(update);
  }

  template <int kStates, NumberType kGradient, typename Master, typename Update>
  void run_narrow_of(const Update& update, const numerics::kernel::Pieces& pieces) const {
    namespace kernel = numerics::kernel;
    NarrowBody<kStates, Update, kGradient, Master> body{update,      all.count, pieces,     all.gradient_scale,
                                                        Master(all), {},        all.rounds, all.random};
    put_states(body.states);
    kernel::launch_each(stream, (all.count + kernel::kPacket - 1) / kernel::kPacket, body);
  }

  template <int kStates, typename Update>
  void run_narrow(const Update& update) const {
    const auto pieces = all.pieces.pieces > 0 ? all.pieces : numerics::kernel::one_piece(all.gradient, all.count);
    constexpr auto fp32 = NumberType::fp32, bf16 = NumberType::bf16;
    if (all.low == nullptr) {
      pieces.type == fp32 ? run_narrow_of<kStates, fp32, WholeMaster>(update, pieces)
                          : run_narrow_of<kStates, bf16, WholeMaster>(update, pieces);
    } else {
      pieces.type == fp32 ? run_narrow_of<kStates, fp32, PackedMaster>(update, pieces)
                          : run_narrow_of<kStates, bf16, PackedMaster>(update, pieces);
    }
  }

  /// With the states that are kept, in the order of their roles, as the updates take them.
  template <int kStates, typename Update>
  void run(const Update& update) const {
    if (all.needs_packets()) return run_narrow<kStates>(update);
    if (all.pieces.pieces > 0 || takes_packets()) return run_packets<kStates>(update);
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
