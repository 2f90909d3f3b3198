// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Collectives without blocks of zeros: the bits of the whole tensors, in no more bytes than they take.
#include "comm/codecs/codec.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>

#include "comm/codecs/nonzero_codec.h"
#include "comm/codecs/quantized_codec.h"
#include "comm/codecs/sign_codec.h"
#include "on_hosts.h"

namespace deeptide::comm {
namespace {

using at::Tensor;

const NonzeroCodec kNonzero;
const Site kStep{"step", "reducing gradients of unit 'embed'"};

struct Ranks {
  explicit Ranks(const World& world)
      : group(world, Team::whole(world), "test", {.timeout = kLong, .board = board_of(world)}) {}

  std::shared_ptr<device::Ledger> ledger = std::make_shared<device::Ledger>();
  device::BufferPool messages{ledger, device::Role::communication, at::kCPU};
  Group group;
};

/// Each `every`-th element is drawn, the others are zero. A rank has `every` + its number.
Tensor mostly_zero(int64_t numel, int64_t every, int rank, at::ScalarType dtype) {
  Tensor values = at::zeros({numel}, dtype);
  for (int64_t i = rank; i < numel; i += every + rank) values[i] = static_cast<float>(i + 1) / 64;
  return values;
}

class NonzeroBlocks : public testing::TestWithParam<int> {};

TEST_P(NonzeroBlocks, GiveTheBitsOfWholeTensors) {
  const int size = GetParam();
  run_ranks(size, [&](const World& world) {
    Ranks own(world);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const int64_t part : {0, 1, 31, 32, 33, 1000, 4097}) {
        for (const int64_t every : {1, 40, 700, 1 << 20}) {
          const Tensor input = mostly_zero(size * part, every, world.rank, dtype);
          if (part > 1) input[part - 1] = -0.0f;
          const Tensor whole = at::empty({size * part}, dtype), packed = at::empty({size * part}, dtype);
          auto pending = own.group.all_to_all(whole, input);
          own.group.wait(pending, kStep);
          all_to_all_coded(own.group, kNonzero, packed, input, own.messages, kStep);
          ASSERT_TRUE(at::equal(packed, whole)) << part << " every " << every;
          ASSERT_TRUE(at::equal(packed.signbit(), whole.signbit())) << "a negative zero travels";
          const Tensor mine = input.narrow(0, 0, part).contiguous();
          pending = own.group.all_gather(whole, mine);
          own.group.wait(pending, kStep);
          all_gather_coded(own.group, kNonzero, packed, mine, own.messages, kStep);
          ASSERT_TRUE(at::equal(packed, whole)) << part << " every " << every;
        }
      }
    }
  });
}

TEST_P(NonzeroBlocks, TakeTheBytesOfWhatIsNotZeroAndNeverMoreThanAll) {
  const int size = GetParam();
  run_ranks(size, [&](const World& world) {
    Ranks own(world);
    constexpr int64_t kPart = 64 * 1024;
    const auto sent_by = [&](const Tensor& input) {
      const Tensor output = at::empty({size * kPart});
      const int64_t before = own.group.sent_bytes();
      all_to_all_coded(own.group, kNonzero, output, input, own.messages, kStep);
      return own.group.sent_bytes() - before;
    };
    const int64_t others = size - 1, counts = others * static_cast<int64_t>(sizeof(int64_t));
    // One block of the first rank's 2048 in the first part: 2048 bits, and a block for each message.
    Tensor one = at::zeros({size * kPart});
    if (world.rank == 0) one[77] = 1.0f;
    EXPECT_EQ(sent_by(one), counts + others * (2048 / 8 + 128));
    EXPECT_EQ(sent_by(at::zeros({size * kPart})), counts + others * (2048 / 8));
    EXPECT_EQ(sent_by(at::randn({size * kPart})), counts + others * kPart * 4);
    // One rank without zeros makes all send whole tensors.
    EXPECT_EQ(sent_by(world.rank == 0 ? at::randn({size * kPart}) : one), counts + others * kPart * 4);
  });
}

TEST(QuantizedCodec, TravelsRoundedAndCountsWhatItLost) {
  run_ranks(2, [&](const World& world) {
    Ranks own(world);
    for (const int bits : {4, 8}) {
      for (const int64_t part : {0, 100, 128, 1000}) {
        at::manual_seed(bits + world.rank);
        numerics::QuantizationLoss lost;
        const QuantizedCodec codec(bits, &lost);
        const Tensor mine = at::randn({part}), whole = at::empty({2 * part}), exact = at::empty({2 * part});
        all_gather_coded(own.group, codec, whole, mine, own.messages, kStep);
        auto pending = own.group.all_gather(exact, mine);
        own.group.wait(pending, kStep);
        for (int64_t rank = 0; rank < 2; ++rank) {
          const Tensor row = exact.narrow(0, rank * part, part), decoded = at::empty({part});
          const Tensor message = at::empty({codec.bytes(row)}, at::kByte);
          numerics::quantize(row, bits, message);
          codec.decode(message, decoded);
          ASSERT_TRUE(at::equal(whole.narrow(0, rank * part, part), decoded)) << part << " of rank " << rank;
        }
        EXPECT_EQ(lost.squares > 0.0, part > 0);
      }
    }
  });
}

/// Two pieces and a gap; one that is in the message's layout but not in this codec.
TEST(SignCodec, SendsSignsAndScalesAndLeavesTheErrorBehind) {
  const Tensor squares = at::zeros({1}, at::kDouble);
  const SignCodec codec(3, {{0, 3, 0}, {16, 4, 2}}, squares);
  const Tensor values = at::zeros({24});
  values.narrow(0, 0, 3).copy_(at::tensor({3.0f, -4.0f, 0.0f}));
  values.narrow(0, 3, 5).fill_(7.0f);
  values.narrow(0, 16, 4).fill_(-2.0f);
  const Tensor before = values.clone(), message = at::zeros({codec.bytes(values)}, at::kByte);
  EXPECT_EQ(message.numel(), 16 + 16) << "three scales and 24 bits, each padded to 16 bytes";
  codec.encode(values, message);
  const Tensor decoded = at::zeros({24});
  codec.decode(message, decoded);
  const auto scale = static_cast<float>(std::sqrt(25.0 / 3));
  EXPECT_TRUE(at::equal(decoded.narrow(0, 0, 3), at::tensor({scale, -scale, scale}))) << "zero counts as positive";
  EXPECT_TRUE(at::equal(decoded.narrow(0, 16, 4), before.narrow(0, 16, 4))) << "equal magnitudes lose nothing";
  EXPECT_TRUE(at::equal(decoded.narrow(0, 3, 13), at::zeros({13}))) << "the gap is not written";
  EXPECT_TRUE(at::equal(values.narrow(0, 0, 3), before.narrow(0, 0, 3) - decoded.narrow(0, 0, 3)));
  EXPECT_TRUE(at::equal(values.narrow(0, 3, 5), before.narrow(0, 3, 5)));
  Tensor sum = at::full({24}, 1.0f);
  codec.add(message, 2.0, sum);
  EXPECT_TRUE(at::equal(sum.narrow(0, 16, 4), at::zeros({4})));
}

INSTANTIATE_TEST_SUITE_P(Worlds, NonzeroBlocks, testing::Values(2, 3));

}  // namespace
}  // namespace deeptide::comm
