// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Eight elements per thread. The arithmetic is the vector code's, on single numbers.
#include "numerics/kernels/kernel_launch.h"
#include "numerics/kernels/kernel_numbers.h"
#include "numerics/kernels/kernel_packets.h"
#include "optim/kernels/lamb_kernel.h"
#include "optim/kernels/single_lane.h"

namespace deeptide::optim::DEEPTIDE_KERNELS {
namespace {

using namespace single;  // NOLINT: V, D and hn, as the rules name them
using numerics::kernel::NumberType;

#include "optim/updates/lamb_update.inl"

using Eight = numerics::kernel::Packet<NumberType::fp32>;

template <NumberType kGradient>
struct LambMeasure {
  DEEPTIDE_HOST_DEVICE void operator()(int64_t i) const {
    namespace kernel = numerics::kernel;
    kernel::PieceReader<kGradient> reader{all.gradient};
    kernel::Packet<kGradient> gradients;
    Eight masters, means, squares, updates;
    reader.load(gradients, i);
    masters.load(all.master, i, all.count);
    means.load(all.exp_avg, i, all.count);
    squares.load(all.exp_avg_sq, i, all.count);
    DEEPTIDE_UNROLLED for (int k = 0; k < kernel::kPacket; ++k) {
      V m = means.value(k), v = squares.value(k);
      updates.set(k, lamb_measured(masters.value(k), gradients.value(k) * all.gradient.scale, m, v, all.scalars));
      means.set(k, m);
      squares.set(k, v);
    }
    means.store(all.exp_avg, i, all.count);
    squares.store(all.exp_avg_sq, i, all.count);
    updates.store(all.update, i, all.count);
  }

  LambArguments all;
};

struct LambApply {
  DEEPTIDE_HOST_DEVICE void operator()(int64_t i) const {
    namespace kernel = numerics::kernel;
    Eight masters, means, squares;
    kernel::Packet<NumberType::bf16> params;  // or fp16: as they lie in memory
    masters.load(all.master, i, all.count);
    means.load(all.exp_avg, i, all.count);
    squares.load(all.exp_avg_sq, i, all.count);
    DEEPTIDE_UNROLLED for (int k = 0; k < kernel::kPacket; ++k) {
      const V p = lamb_moved(masters.value(k), means.value(k), squares.value(k), all.scalars);
      masters.set(k, p);
      params.set_bits(k, all.param.type == NumberType::fp16 ? kernel::to_fp16(p) : kernel::to_bf16(p));
    }
    masters.store(all.master, i, all.count);
    if (all.param.data != nullptr) params.store(all.param.data, i, all.count);
  }

  LambArguments all;
};

}  // namespace

bool has_lamb() { return numerics::kernel::is_runnable<LambApply>(); }

void lamb(const LambArguments& all, void* stream) {
  namespace kernel = numerics::kernel;
  const int64_t packets = (all.count + kernel::kPacket - 1) / kernel::kPacket;
  if (all.gradient.pieces == 0) return kernel::launch_each(stream, packets, LambApply{all});
  switch (all.gradient.type) {
    case NumberType::fp32:
      return kernel::launch_each(stream, packets, LambMeasure<NumberType::fp32>{all});
    case NumberType::bf16:
      return kernel::launch_each(stream, packets, LambMeasure<NumberType::bf16>{all});
    case NumberType::fp16:
      return kernel::launch_each(stream, packets, LambMeasure<NumberType::fp16>{all});
  }
}

}  // namespace deeptide::optim::DEEPTIDE_KERNELS
