// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Streams that share a queue of the hardware: a wait at its head stalls what others issued behind it.
#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "simulated/streams.h"

namespace deeptide::simulated {
namespace {

/// Streams of their own, so that a task of one may stay on the device while the others go on.
class Connections : public testing::TestWithParam<Schedule> {
 protected:
  static Machine& machine() { return Machine::instance(); }

  static void configure(unsigned connections) {
    Settings settings;
    settings.schedule = GetParam();
    settings.connections = connections;
    machine().configure(settings);
  }

  void TearDown() override {
    EXPECT_EQ(machine().settle(), "");
    machine().configure({});
  }

  static Event task_on(int stream, std::function<void()> run) {
    Event done;
    machine().enqueue(stream, {.name = "task", .uses = {}, .run = std::move(run), .cost = {}});
    machine().record(done, stream);
    return done;
  }

  /// Whether the event passes within a moment, long for a task that may begin.
  static bool passes_soon(const Event& event) {
    const auto last = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
    while (!machine().query(event)) {
      if (std::chrono::steady_clock::now() > last) return false;
      std::this_thread::yield();
    }
    return true;
  }
};

TEST_P(Connections, StallWhatIsBehindAWaitOfAnotherStream) {
  for (const unsigned connections : {0U, 1U}) {
    configure(connections);
    const int busy = machine().new_stream(), waiting = machine().new_stream(), other = machine().new_stream();
    std::promise<void> end;
    const Event first = task_on(busy, [ended = end.get_future().share()] { ended.wait(); });
    const Event beside = task_on(other, [] {});
    machine().start(first);
    machine().synchronize(beside);  // a task that has begun keeps nobody
    machine().wait(first, waiting);
    const Event behind = task_on(other, [] {});
    if (connections == 0) {
      machine().synchronize(behind);
    } else {
      EXPECT_FALSE(passes_soon(behind));
    }
    end.set_value();
    machine().synchronize(behind);
    machine().synchronize_stream(waiting);
    for (const int stream : {busy, waiting, other}) machine().free_stream(stream);
  }
}

TEST_P(Connections, KeepTheOrderOfWhatTheyCarry) {
  configure(1);
  std::vector<int> streams, order;
  for (int i = 0; i < 5; ++i) streams.push_back(machine().new_stream());
  Event last;
  for (int i = 0; i < 50; ++i) {
    const int stream = streams[static_cast<size_t>(i * 7) % streams.size()];
    machine().wait(last, stream);
    last = task_on(stream, [&order, i] { order.push_back(i); });
  }
  machine().synchronize(last);
  ASSERT_EQ(order.size(), 50U);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
  for (const int stream : streams) machine().free_stream(stream);
}

TEST_P(Connections, AreTakenInTurn) {
  configure(2);
  std::vector<int> streams;
  for (int i = 0; i < 4; ++i) streams.push_back(machine().new_stream());
  std::sort(streams.begin(), streams.end());
  const auto of_queue = [&](int queue) {
    return *std::find_if(streams.begin(), streams.end(), [&](int stream) { return stream % 2 == queue; });
  };
  std::promise<void> end;
  const Event first = task_on(of_queue(0), [ended = end.get_future().share()] { ended.wait(); });
  machine().start(first);
  machine().wait(first, *std::find_if(streams.begin(), streams.end(),
                                      [&](int stream) { return stream % 2 == 0 && stream != of_queue(0); }));
  machine().synchronize(task_on(of_queue(1), [] {}));  // the other queue
  end.set_value();
  machine().synchronize();
  for (const int stream : streams) machine().free_stream(stream);
}

INSTANTIATE_TEST_SUITE_P(Schedules, Connections,
                         testing::Values(Schedule::random, Schedule::late, Schedule::late_default,
                                         Schedule::late_others),
                         schedule_name);

}  // namespace
}  // namespace deeptide::simulated
