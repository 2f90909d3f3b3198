// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The order checker finds each planted missing wait under every schedule, and nothing where the order is right.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <chrono>
#include <future>

#include "simulated/streams.h"

namespace deeptide::simulated {
namespace {

using at::Tensor;

class Order : public EverySchedule {
 protected:
  const c10::Stream first = new_stream(), second = new_stream();

  static Tensor ones(int64_t numel) { return at::ones({numel}, at::TensorOptions().device(simulated_device())); }
  static void synchronize() { guard().synchronizeDevice(0); }

  /// Expects an error from `call` that names both sides, and takes it back.
  template <typename Call>
  static void expect_finding(const Call& call, const std::string& text) {
    try {
      call();
      ADD_FAILURE() << "no error; expected " << text;
    } catch (const c10::Error& error) {
      EXPECT_TRUE(has_match(error.what_without_backtrace(), text)) << error.what_without_backtrace();
    }
    const std::string finding = Machine::instance().settle();
    EXPECT_TRUE(has_match(finding, text)) << finding;
  }
};

TEST_P(Order, IsCheckedForReadsAfterWrites) {
  for (const bool waits : {true, false}) {
    Tensor x;
    {
      const On on(first);
      x = ones(1000) * 3;
    }
    const auto written = recorded(first);
    if (waits) written.block(second);
    const On on(second);
    if (waits) {
      EXPECT_EQ((x * 2).sum().item<float>(), 6000);
      first.synchronize();
    } else {
      expect_finding([&] { x * 2; },
                     "'aten::mul.*' on stream [0-9]+ reads bytes .0, 4000. .*'aten::mul.*' on "
                     "stream [0-9]+ writes .*does not wait for it");
    }
  }
}

TEST_P(Order, IsCheckedForWritesAfterReads) {
  for (const bool waits : {true, false}) {
    Tensor x = ones(10), y;
    synchronize();
    {
      const On on(first);
      y = x + 1;
    }
    const auto read = recorded(first);
    if (waits) read.block(second);
    {
      const On on(second);
      if (waits) {
        x.zero_();
      } else {
        expect_finding([&] { x.zero_(); },
                       "'aten::zero_.*' on stream [0-9]+ writes .*'aten::add.*' on stream [0-9]+ reads");
      }
    }
    synchronize();
    EXPECT_EQ(y.sum().item<float>(), 20);
  }
}

TEST_P(Order, IsNotGivenByAnEventThatWasRecordedTooEarly) {
  Tensor x = ones(10);
  synchronize();
  const auto early = recorded(first);
  {
    const On on(first);
    x.add_(1);
  }
  early.block(second);
  const On on(second);
  expect_finding([&] { x + 1; }, "reads");
}

TEST_P(Order, HoldsThroughAThirdStream) {
  const c10::Stream third = new_stream();
  Tensor x = ones(10);
  synchronize();
  {
    const On on(first);
    x.add_(1);
  }
  recorded(first).block(third);
  recorded(third).block(second);
  {
    const On on(second);
    x.add_(1);
  }
  second.synchronize();
  EXPECT_EQ(x.sum().item<float>(), 30);
}

TEST_P(Order, IsOfBytesNotOfStorages) {
  Tensor flat = at::zeros({100}, at::TensorOptions().device(simulated_device()));
  synchronize();
  {
    const On on(first);
    flat.narrow(0, 0, 50).fill_(1);
  }
  const On on(second);
  flat.narrow(0, 50, 50).fill_(2);
  expect_finding([&] { flat.narrow(0, 49, 2).sum(); }, "reads bytes .196, 204. .*'aten::fill_.*writes .bytes .0, 200.");
  EXPECT_EQ(flat.sum().item<float>(), 150);
}

TEST_P(Order, IsCheckedBetweenAnAllocationAndItsFirstUseElsewhere) {
  Tensor x;
  {
    const On on(first);
    ones(4).add_(1);
    x = empty_simulated({4});
  }
  const On on(second);
  expect_finding([&] { x.zero_(); }, "'allocation' on stream [0-9]+ writes");
}

TEST_P(Order, IsCheckedWhereMemoryIsFreedBeforeAUse) {
  for (const char* const how : {"wait", "record_stream", "nothing"}) {
    Tensor x, y;
    {
      const On on(first);
      x = ones(1000);
    }
    recorded(first).block(second);
    {
      const On on(second);
      y = x + 1;
    }
    if (std::string(how) == "wait") recorded(second).block(first);
    if (std::string(how) == "record_stream") x.record_stream(second);
    x = Tensor();
    if (std::string(how) == "nothing") {
      expect_finding(
          [] { empty_simulated({1}); },
          "memory of 4000 bytes of stream [0-9]+ was freed before a use: 'aten::add.*' on stream [0-9]+ reads");
    }
    synchronize();
    EXPECT_EQ(y.sum().item<float>(), 2000);
  }
}

TEST_P(Order, IsCheckedWhereTheHostReadsOrWritesPinnedMemory) {
  Machine& machine = Machine::instance();
  const auto pinned = at::TensorOptions().pinned_memory(true);
  const Tensor source = at::full({1000}, 2.0f, pinned), back = at::zeros({1000}, pinned);
  ASSERT_TRUE(source.is_pinned());
  const auto touch = [&](const Tensor& tensor, bool write) {
    with_torch_errors([&] { machine.host_access(tensor.const_data_ptr(), tensor.nbytes(), write, "test"); });
  };
  for (const bool writes : {false, true}) {
    const On on(first);
    Tensor x = source.to(simulated_device(), /*non_blocking=*/true);
    back.copy_(x * 2, /*non_blocking=*/true);
    touch(source, false);  // read on both sides
    if (writes) {
      expect_finding([&] { touch(source, true); }, "the host .test. writes a pinned .*'copy_ host to device'.* reads");
    } else {
      expect_finding([&] { touch(back, false); }, "the host .test. reads a pinned .*'copy_ device to host'.* writes");
    }
  }
  const On on(first);
  back.copy_(source.to(simulated_device(), true), true);
  first.synchronize();
  touch(back, true);
  EXPECT_EQ(back.sum().item<float>(), 2000);
}

INSTANTIATE_TEST_SUITE_P(Schedules, Order, every_schedule(), schedule_name);

/// Parameters streamed from pinned memory into two slots, as an engine does that offloads them.
float stream_layers(bool waits_for_copies, bool waits_for_uses) {
  constexpr int kLayers = 6;
  const c10::Stream copies = new_stream(), compute = default_stream();
  std::vector<Tensor> host;
  for (int i = 0; i < kLayers; ++i) {
    host.push_back(at::full({256}, static_cast<float>(i), at::TensorOptions().pinned_memory(true)));
  }
  Tensor slots = empty_simulated({2, 256}), sum = at::ones({256}, at::TensorOptions().device(simulated_device()));
  recorded(compute).block(copies);
  std::vector<c10::Event> used;
  for (int i = 0; i < kLayers; ++i) {
    if (i >= 2 && waits_for_uses) used[static_cast<size_t>(i) - 2].block(copies);
    {
      const On on(copies);
      slots[i % 2].copy_(host[static_cast<size_t>(i)], /*non_blocking=*/true);
    }
    if (waits_for_copies) recorded(copies).block(compute);
    sum = sum + slots[i % 2];
    used.push_back(recorded(compute));
  }
  if (!waits_for_uses) copies.synchronize();
  compute.synchronize();  // what lacks a wait has gone ahead now
  recorded(copies).block(compute);
  return sum.sum().item<float>();
}

class Prefetches : public EverySchedule {};

TEST_P(Prefetches, AreFoundToLackAWaitEveryTime) {
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(stream_layers(true, true), 256 * 16);
    EXPECT_THROW(stream_layers(false, true), c10::Error);
    EXPECT_TRUE(has_match(Machine::instance().settle(), "'aten::add.*' on stream 0 reads .*'copy_ host to device'"));
    EXPECT_THROW(stream_layers(true, false), c10::Error);
    EXPECT_TRUE(has_match(Machine::instance().settle(), "'copy_ host to device'.* writes .*'aten::add.*' on stream 0"));
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, Prefetches, every_schedule(), schedule_name);

TEST(Streams, HeldBackShowWrongValuesWhereNothingChecks) {
  for (const bool copies_late : {true, false}) {
    Settings settings;
    settings.schedule = copies_late ? Schedule::late_others : Schedule::late_default;
    settings.check = false;
    Machine::instance().configure(settings);
    EXPECT_EQ(stream_layers(true, true), 256 * 16);
    EXPECT_NE(stream_layers(!copies_late, copies_late), 256 * 16);
  }
  EXPECT_EQ(Machine::instance().settle(), "");
  Machine::instance().configure({});
}

TEST(Streams, HeldBackGoOnAfterTheirPatienceThoughNobodyNeedsThem) {
  Settings settings;
  settings.schedule = Schedule::late;
  settings.patience_ms = 10;
  Machine::instance().configure(settings);
  std::promise<void> done;
  Task task;
  task.name = "what another rank waits for";
  task.run = [&] { done.set_value(); };
  Machine::instance().enqueue(0, std::move(task), HostWait::no);
  EXPECT_EQ(done.get_future().wait_for(std::chrono::minutes(1)), std::future_status::ready);
  Machine::instance().configure({});
}

}  // namespace
}  // namespace deeptide::simulated
