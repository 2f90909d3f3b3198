// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rounded numbers are neighbours of the exact one, right on average, and a function of seed, step, stream and index.
#include "numerics/rounding/stochastic_rounding.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_modes.h"

namespace deeptide::numerics {
namespace {

using Halves = std::vector<uint16_t>;

float value_of(uint16_t half) { return std::bit_cast<float>(static_cast<uint32_t>(half) << 16); }

Halves rounded(const std::vector<float>& values, const RandomKey& key = RandomKey::of(1, 1), int stream = 0,
               int64_t index = 0) {
  Halves halves(values.size());
  round_stochastically(values.data(), static_cast<int64_t>(values.size()), halves.data(), key, stream, index);
  return halves;
}

/// How many of `count` elements round away from zero.
double share_rounded_up(float value, const RandomKey& key, int stream, int64_t count = 1 << 18) {
  const Halves halves = rounded(std::vector<float>(static_cast<size_t>(count), value), key, stream);
  const auto down = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  int64_t up = 0;
  for (const uint16_t half : halves) {
    EXPECT_TRUE(half == down || half == down + 1) << value;
    up += half == down + 1 ? 1 : 0;
  }
  return static_cast<double>(up) / static_cast<double>(count);
}

/// The distance to the lower neighbour in bf16, in units of the two neighbours' distance.
double fraction_of(float value) { return static_cast<double>(std::bit_cast<uint32_t>(value) & 0xFFFFu) / 65536.0; }

TEST(StochasticRounding, IsRightOnAverageInEveryStream) {
  constexpr double kCount = 1 << 18;
  for (const uint32_t low : {0x0000u, 0x0010u, 0x1000u, 0x5555u, 0x8000u, 0xC123u, 0xFFF0u}) {
    for (const uint32_t high : {0x3F80u, 0xBF81u, 0x0001u, 0x8000u, 0x7F7Eu, 0x2A13u}) {
      const float value = std::bit_cast<float>(high << 16 | low);
      const double wanted = fraction_of(value), deviation = std::sqrt(wanted * (1 - wanted) / kCount);
      for (int stream = 0; stream < RandomKey::kStreams; ++stream) {
        const double got = share_rounded_up(value, RandomKey::of(7, 3), stream);
        EXPECT_NEAR(got, wanted, 5 * deviation) << std::hex << high << " " << low << " stream " << stream;
      }
    }
  }
}

/// One element over many steps, and many elements and streams of one step, must not know of each other.
TEST(StochasticRounding, IsRightOnAverageOverStepsAndIndependentOfNeighbours) {
  constexpr int kSteps = 4096, kElements = 64;
  const float value = std::bit_cast<float>(0x3F804000u);  // up once in four
  std::vector<int> ups(kElements, 0);
  int64_t pairs = 0, streams = 0, steps = 0;
  Halves before;
  for (int step = 1; step <= kSteps; ++step) {
    const RandomKey key = RandomKey::of(11, static_cast<uint64_t>(step));
    const std::vector<float> values(kElements, value);
    const Halves halves = rounded(values, key, 0), others = rounded(values, key, 1);
    for (size_t i = 0; i < kElements; ++i) {
      const bool up = halves[i] != 0x3F80;
      ups[i] += up ? 1 : 0;
      if (i > 0 && up && halves[i - 1] != 0x3F80) ++pairs;
      if (up && others[i] != 0x3F80) ++streams;
      if (up && !before.empty() && before[i] != 0x3F80) ++steps;
    }
    before = halves;
  }
  for (const int up : ups) EXPECT_NEAR(up / double{kSteps}, 0.25, 5 * std::sqrt(0.25 * 0.75 / kSteps));
  const double both = 0.0625, deviation = std::sqrt(both * (1 - both) / (double{kSteps} * kElements));
  const double all = double{kSteps} * kElements;
  EXPECT_NEAR(static_cast<double>(pairs) / (double{kSteps} * (kElements - 1)), both, 6 * deviation);
  EXPECT_NEAR(static_cast<double>(streams) / all, both, 6 * deviation);
  EXPECT_NEAR(static_cast<double>(steps) / (double{kSteps - 1} * kElements), both, 6 * deviation);
}

TEST(StochasticRounding, DoesNotDependOnHowElementsAreCutNorOnTheInstructionSet) {
  constexpr int64_t kCount = 1003;
  std::vector<float> values;
  for (int i = 0; i < kCount; ++i) values.push_back(std::sin(static_cast<float>(i)) * 0.01f);
  const RandomKey key = RandomKey::of(5, 9);
  // Around 2^32 the index's upper half changes within a vector.
  for (const int64_t index : {int64_t{0}, int64_t{13}, (int64_t{1} << 32) - 500, (int64_t{3} << 32) - 7}) {
    const Halves whole = rounded(values, key, 1, index);
    for (const int64_t length : {1, 5, 16, 17, 64}) {
      for (int64_t begin = 0; begin < kCount; begin += length) {
        const int64_t count = std::min(length, kCount - begin);
        const std::vector<float> part(values.begin() + begin, values.begin() + begin + count);
        const Halves got = rounded(part, key, 1, index + begin);
        for (int64_t i = 0; i < count; ++i) ASSERT_EQ(got[i], whole[begin + i]) << index + begin + i;
      }
    }
    for (const int64_t target : {int64_t{HWY_SCALAR}, int64_t{HWY_AVX2}}) {
      if (target != HWY_SCALAR && !(hwy::SupportedTargets() & target)) continue;
      const Target chosen(target);
      ASSERT_EQ(rounded(values, key, 1, index), whole) << hwy::TargetName(target);
    }
  }
}

TEST(StochasticRounding, DrawsOtherBitsForAnotherSeedStepStreamOrPlace) {
  const std::vector<float> values(1000, std::bit_cast<float>(0x3F808000u));
  const Halves first = rounded(values);
  EXPECT_EQ(rounded(values), first);
  EXPECT_NE(rounded(values, RandomKey::of(2, 1)), first);
  EXPECT_NE(rounded(values, RandomKey::of(1, 2)), first);
  for (int stream = 1; stream < RandomKey::kStreams; ++stream) {
    EXPECT_NE(rounded(values, RandomKey::of(1, 1), stream), first) << stream;
  }
  EXPECT_NE(rounded(values, RandomKey::of(1, 1), 0, int64_t{1} << 32), first);
}

TEST(StochasticRounding, KeepsWhatBf16HasAndWhatIsNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> exact;
  for (uint32_t high = 0; high < 0x10000; ++high) exact.push_back(std::bit_cast<float>(high << 16));
  const Halves kept = rounded(exact);
  for (size_t i = 0; i < exact.size(); ++i) {
    if (std::isnan(exact[i])) {
      ASSERT_TRUE(std::isnan(value_of(kept[i])));
    } else {
      ASSERT_EQ(kept[i], i);
    }
  }
  for (const float largest : {std::numeric_limits<float>::max(), std::numeric_limits<float>::lowest()}) {
    for (const uint16_t half : rounded(std::vector<float>(1000, largest))) {
      ASSERT_EQ(value_of(half), std::copysign(std::bit_cast<float>(0x7F7F0000u), largest));
    }
  }
  const float hidden = std::bit_cast<float>(0x7F800001u);  // a NaN to its last bits only
  for (const uint16_t half : rounded({hidden, -hidden})) EXPECT_TRUE(std::isnan(value_of(half)));
  EXPECT_EQ(value_of(rounded({kInfinity})[0]), kInfinity);
  EXPECT_EQ(value_of(rounded({-kInfinity})[0]), -kInfinity);
}

TEST(StochasticRounding, HasTheSameBitsInOperatorsOfTorch) {
  std::vector<float> values;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0xFFFFu}) {
      values.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  const auto count = static_cast<int64_t>(values.size());
  const at::Tensor from = at::from_blob(values.data(), {count}, at::kFloat), to = at::empty({count}, at::kBFloat16);
  const RandomKey key = RandomKey::of(0xFEDCBA9876543210u, 9);
  for (const int64_t index : {int64_t{0}, (int64_t{1} << 32) - 500, (int64_t{3} << 32) - 7}) {
    for (int stream = 0; stream < RandomKey::kStreams; ++stream) {
      round_stochastically(from, to, key, stream, index);
      const auto* got = static_cast<const uint16_t*>(to.const_data_ptr());
      ASSERT_EQ(Halves(got, got + count), rounded(values, key, stream, index)) << index << " stream " << stream;
    }
  }
}

}  // namespace
}  // namespace deeptide::numerics
