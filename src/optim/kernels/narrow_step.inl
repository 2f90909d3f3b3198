// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Eight elements' steps where the master is packed, or states have 16 bits; included within the kernels' namespace.

/// Masters in fp32; `param` receives them in 16 bits, if it is there.
struct WholeMaster {
  struct Eight {
    numerics::kernel::Packet<NumberType::fp32> masters;
    numerics::kernel::Packet<NumberType::bf16> params;  // or fp16: as they lie in memory
  };

  explicit WholeMaster(const StepArguments& all) : master(all.master), param(all.param) {}

  DEEPTIDE_HOST_DEVICE void load(Eight& own, int64_t i, int64_t count) const {
    own.masters.load(master.data, i, count);
  }
  DEEPTIDE_HOST_DEVICE float value(const Eight& own, int k) const { return own.masters.value(k); }
  DEEPTIDE_HOST_DEVICE void set(Eight& own, int k, float p) const {
    namespace kernel = numerics::kernel;
    own.masters.set(k, p);
    own.params.set_bits(k, param.type == NumberType::fp16 ? kernel::to_fp16(p) : kernel::to_bf16(p));
  }
  DEEPTIDE_HOST_DEVICE void store(const Eight& own, int64_t i, int64_t count) const {
    own.masters.store(master.data, i, count);
    if (param.data != nullptr) own.params.store(param.data, i, count);
  }

  Numbers master, param;
};

/// The parameters in bf16 and what rounding took from them. A thread has a byte of `above` to itself.
struct PackedMaster {
  struct Eight {
    numerics::kernel::Packet<NumberType::bf16> high, low;
    uint32_t above;
  };

  explicit PackedMaster(const StepArguments& all) : high(all.master.data), low(all.low), above(all.above) {}

  DEEPTIDE_HOST_DEVICE void load(Eight& own, int64_t i, int64_t count) const {
    own.high.load(high, i, count);
    own.low.load(low, i, count);
    own.above = above[i];
  }
  DEEPTIDE_HOST_DEVICE float value(const Eight& own, int k) const {
    return numerics::kernel::unpacked(own.high.bits(k), own.low.bits(k), (own.above >> k & 1u) != 0);
  }
  DEEPTIDE_HOST_DEVICE void set(Eight& own, int k, float p) const {
    namespace kernel = numerics::kernel;
    const uint32_t rest = kernel::low_half(p);
    own.high.replace_bits(k, kernel::to_bf16(p));
    own.low.replace_bits(k, rest);
    if (rest == kernel::kHalfway) own.above = (own.above & ~(1u << k)) | (kernel::is_above(p) ? 1u : 0u) << k;
  }
  DEEPTIDE_HOST_DEVICE void store(const Eight& own, int64_t i, int64_t count) const {
    own.high.store(high, i, count);
    own.low.store(low, i, count);
    above[i] = static_cast<uint8_t>(own.above);
  }

  void* high;
  void* low;
  uint8_t* above;  // a bit per element
};

/// States in fp32, or in bf16 and rounded stochastically: the k-th takes the k-th stream.
template <int kStates, typename Update, NumberType kGradient, typename Master>
struct NarrowBody {
  DEEPTIDE_HOST_DEVICE void operator()(int64_t i) const {
    namespace kernel = numerics::kernel;
    kernel::PieceReader<kGradient> reader{pieces};
    kernel::Packet<kGradient> gradients;
    kernel::Packet<NumberType::fp32> kept[kStates + 1];
    typename Master::Eight own;
    reader.load(gradients, i);
    master.load(own, i, count);
    DEEPTIDE_UNROLLED for (int s = 0; s < kStates; ++s) load_state(kept[s], s, i);
    DEEPTIDE_UNROLLED for (int k = 0; k < kernel::kPacket; ++k) {
      V values[kStates + 1];
      DEEPTIDE_UNROLLED for (int s = 0; s < kStates; ++s) values[s] = kept[s].value(k);
      const V g = gradients.value(k) * pieces.scale * gradient_scale;
      master.set(own, k, updated<kStates>(update, master.value(own, k), g, values));
      DEEPTIDE_UNROLLED for (int s = 0; s < kStates; ++s) kept[s].set(k, values[s]);
    }
    DEEPTIDE_UNROLLED for (int s = 0; s < kStates; ++s) store_state(kept[s], s, i);
    master.store(own, i, count);
  }

  DEEPTIDE_HOST_DEVICE void load_state(numerics::kernel::Packet<NumberType::fp32>& kept, int s, int64_t i) const {
    namespace kernel = numerics::kernel;
    if (!rounds) return kept.load(states[s], i, count);
    kernel::Packet<NumberType::bf16> halves;
    halves.load(states[s], i, count);
    DEEPTIDE_UNROLLED for (int k = 0; k < kernel::kPacket; ++k) kept.set(k, halves.value(k));
  }

  DEEPTIDE_HOST_DEVICE void store_state(const numerics::kernel::Packet<NumberType::fp32>& kept, int s,
                                        int64_t i) const {
    namespace kernel = numerics::kernel;
    if (!rounds) return kept.store(states[s], i, count);
    kernel::Packet<NumberType::bf16> halves;
    DEEPTIDE_UNROLLED for (int k = 0; k < kernel::kPacket; ++k) {
      halves.set_bits(k, kernel::rounded_by(kept.value(k), random, s, i * kernel::kPacket + k));
    }
    halves.store(states[s], i, count);
  }

  Update update;
  int64_t count;
  numerics::kernel::Pieces pieces;
  float gradient_scale;
  Master master;
  void* states[kStates + 1];
  bool rounds;
  numerics::kernel::RandomBits random;
};
