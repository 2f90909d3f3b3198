// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Simulated time keeps what is stated of bandwidths, whatever the clock on the wall says.
#include "simulated/machine/timeline.h"

#include <ATen/ops/empty.h>

#include "simulated/streams.h"

namespace deeptide::simulated {
namespace {

constexpr Bandwidths kBandwidths = {0, 4e6, 2e6, 1e6};  // to the device, to the host, between ranks

TEST(Timeline, GivesTransfersTheirEnginesBandwidth) {
  Timeline timeline;
  timeline.set_bandwidths(kBandwidths);
  EXPECT_DOUBLE_EQ(timeline.add(1, {Engine::to_device, 4'000'000, 0}), 1);
  EXPECT_DOUBLE_EQ(timeline.add(2, {Engine::to_device, 4'000'000, 0}), 2);  // one copy at a time in each direction
  EXPECT_DOUBLE_EQ(timeline.add(3, {Engine::to_host, 4'000'000, 0}), 2);
  EXPECT_DOUBLE_EQ(timeline.add(4, {Engine::link, 500'000, 0.25}), 0.75);
  EXPECT_DOUBLE_EQ(timeline.add(0, {Engine::compute, 0, 0.5}), 0.5);
  EXPECT_DOUBLE_EQ(timeline.add(5, {Engine::compute, 0, 0.5}), 0.5);
}

TEST(Timeline, GivesAnEngineToWhatIsReady) {
  Timeline timeline;
  timeline.set_bandwidths(kBandwidths);
  timeline.wait(1, 2);
  EXPECT_DOUBLE_EQ(timeline.add(1, {Engine::link, 1'000'000, 0}), 3);  // issued first, ready at 2
  EXPECT_DOUBLE_EQ(timeline.add(2, {Engine::link, 1'500'000, 0}), 1.5);
  EXPECT_DOUBLE_EQ(timeline.add(3, {Engine::link, 1'000'000, 0}), 4);  // half a second is left before
  EXPECT_DOUBLE_EQ(timeline.add(4, {Engine::link, 500'000, 0}), 2);
}

TEST(Timeline, FollowsWaitsOfStreamsAndOfTheHost) {
  Timeline timeline;
  timeline.add(0, {Engine::compute, 0, 3});
  timeline.wait(1, timeline.end_of(0));
  EXPECT_DOUBLE_EQ(timeline.add(1, {Engine::compute, 0, 1}), 4);
  EXPECT_DOUBLE_EQ(timeline.host(), 0);
  timeline.host_wait(4);
  EXPECT_DOUBLE_EQ(timeline.add(2, {Engine::compute, 0, 1}), 5);  // not issued before the host had waited
}

/// Layers of 2 s whose copies take 1 s, behind one another or one layer ahead. Returns the simulated seconds.
double seconds_of_layers(bool prefetches) {
  constexpr int kLayers = 8;
  Timeline timeline;
  timeline.set_bandwidths(kBandwidths);
  double end = 0;
  for (int layer = 0; layer < kLayers; ++layer) {
    const double copied = timeline.add(prefetches ? 1 : 0, {Engine::to_device, 4'000'000, 0});
    timeline.wait(0, copied);
    end = timeline.add(0, {Engine::compute, 0, 2});
  }
  return end;
}

TEST(Timeline, ShowsWhatOverlapSaves) {
  EXPECT_DOUBLE_EQ(seconds_of_layers(false), 8 * (1 + 2));
  EXPECT_DOUBLE_EQ(seconds_of_layers(true), 1 + 8 * 2);
}

TEST(Timeline, KeepsWhatIsBehindAWaitInASharedQueue) {
  for (const unsigned connections : {0U, 1U, 2U}) {
    Timeline timeline;
    timeline.set_bandwidths(kBandwidths);
    timeline.set_connections(connections);
    timeline.add(0, {Engine::compute, 0, 3});
    EXPECT_DOUBLE_EQ(timeline.add(1, {Engine::compute, 0, 1}), 1) << "what has begun keeps nobody";
    timeline.wait(2, timeline.end_of(0));
    EXPECT_DOUBLE_EQ(timeline.add(4, {Engine::to_device, 4'000'000, 0}), connections == 0 ? 1 : 4);
    EXPECT_DOUBLE_EQ(timeline.add(3, {Engine::link, 1'000'000, 0}), connections == 1 ? 4 : 1);
  }
}

class SimulatedTime : public EverySchedule {};

TEST_P(SimulatedTime, OfCopiesIsTheSameUnderEverySchedule) {
  Settings settings;
  settings.bandwidths = kBandwidths;
  configure(settings);
  const auto pinned = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
  const at::Tensor host = at::empty({1'000'000}, pinned), back = at::empty({1'000'000}, pinned);
  const c10::Stream copies = new_stream();
  const double before = Machine::instance().host_time_s();
  at::Tensor device;
  {
    const On on(copies);
    device = host.to(simulated_device(), /*non_blocking=*/true);
    back.copy_(device, /*non_blocking=*/true);
  }
  EXPECT_DOUBLE_EQ(Machine::instance().host_time_s(), before);  // nobody waited
  copies.synchronize();
  EXPECT_DOUBLE_EQ(Machine::instance().host_time_s() - before, 0.25 + 0.5);
}

TEST_P(SimulatedTime, PassesBetweenEvents) {
  Settings settings;
  settings.bandwidths = kBandwidths;
  configure(settings);
  const at::Tensor host = at::empty({2'000'000}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  const c10::Event first = recorded(default_stream());
  const at::Tensor device = host.to(simulated_device(), /*non_blocking=*/true);
  const c10::Event second = recorded(default_stream());
  second.synchronize();
  EXPECT_DOUBLE_EQ(first.elapsedTime(second), 500);
}

INSTANTIATE_TEST_SUITE_P(Schedules, SimulatedTime, every_schedule(), schedule_name);

}  // namespace
}  // namespace deeptide::simulated
