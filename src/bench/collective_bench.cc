// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Makes patterns that check a collective, and runs the loop that times it.
#include "bench/collective_bench.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <chrono>

namespace deeptide::bench {
namespace {

using at::Tensor;
using comm::Pending;
using comm::Site;
using std::chrono::steady_clock;

constexpr std::chrono::minutes kTimeout{5};
constexpr int64_t kCacheLine = 64;  // bytes
constexpr int kMaxAddends = 128;    // values are at most 2: bf16 counts exactly to 256
const Site kSite{"benchmark", "a collective"};

/// A periodic sequence of small integers, applied to tensors of any length from one short piece.
class Pattern {
 public:
  Pattern(int64_t period, const std::function<int64_t(int64_t)>& value, const Tensor& like) : period_(period) {
    const int64_t whole = period * (std::min<int64_t>(like.numel(), 1 << 16) / period + 2);
    std::vector<float> values(whole);
    for (const auto i : c10::irange(whole)) values[i] = static_cast<float>(value(i % period));
    piece_ =
        at::from_blob(values.data(), {whole}, at::kFloat).to(like.options(), /*non_blocking=*/false, /*copy=*/true);
  }

  /// Calls use(part of `tensor`, its expected part), piece by piece, from element `begin` of the sequence.
  void walk(const Tensor& tensor, int64_t begin, const std::function<void(const Tensor&, const Tensor&)>& use) const {
    const int64_t longest = piece_.numel() - period_;
    for (int64_t at = 0; at < tensor.numel(); at += longest) {
      const int64_t length = std::min(longest, tensor.numel() - at);
      use(tensor.narrow(0, at, length), piece_.narrow(0, (begin + at) % period_, length));
    }
  }

 private:
  int64_t period_;
  Tensor piece_;
};

/// Data that moves unchanged: values up to 250, which every type holds.
Pattern moved(int64_t source, const Tensor& like) {
  constexpr int64_t kPeriod = 251;
  return {kPeriod, [=](int64_t i) { return (17 * source + i) % kPeriod; }, like};
}

/// Returns what `rank` adds to element i. In large worlds at most kMaxAddends ranks add, by turns, so no type rounds.
int64_t addend(int rank, int world_size, int64_t i) {
  const int64_t turns = (world_size + kMaxAddends - 1) / kMaxAddends;
  return rank % turns == i / 7 % turns ? i * (rank % 6 + 1) % 7 % 3 : 0;
}

int64_t sum_period(int world_size) { return 7 * ((world_size + kMaxAddends - 1) / kMaxAddends); }

Pattern part_of_sum(const CollectiveShape& shape, const Tensor& like) {
  return {sum_period(shape.world_size), [&](int64_t i) { return addend(shape.rank, shape.world_size, i); }, like};
}

Pattern sum_of_all(const CollectiveShape& shape, const Tensor& like) {
  const auto sum = [&](int64_t i) {
    int64_t total = 0;
    for (const int rank : c10::irange(shape.world_size)) total += addend(rank, shape.world_size, i);
    return total;
  };
  return {sum_period(shape.world_size), sum, like};
}

void check_part(const CollectiveShape& shape, const Tensor& whole, const Tensor& part, const Pattern& pattern,
                int64_t begin = 0) {
  pattern.walk(part, begin, [&](const Tensor& got, const Tensor& expected) {
    if (at::equal(got, expected)) return;
    const int64_t first = got.ne(expected).nonzero()[0].item<int64_t>();
    TORCH_CHECK(false, "wrong result: ", name_of(shape.collective), " of ", shape.numel * whole.element_size(),
                " bytes, rank ", shape.rank, " of ", shape.world_size, ": element ",
                got.storage_offset() - whole.storage_offset() + first, " is ", got[first].item<float>(), ", expected ",
                expected[first].item<float>());
  });
}

}  // namespace

const char* name_of(Collective collective) {
  static constexpr const char* kNames[] = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast"};
  return kNames[static_cast<size_t>(collective)];
}

double bus_factor(Collective collective, int world_size) {
  const double others = static_cast<double>(world_size - 1) / world_size;
  if (collective == Collective::broadcast) return 1.0;
  return collective == Collective::all_reduce ? 2.0 * others : others;
}

int64_t CollectiveShape::input_numel() const {
  return collective == Collective::all_gather ? numel / world_size : numel;
}

int64_t CollectiveShape::output_numel() const {
  return collective == Collective::reduce_scatter ? numel / world_size : numel;
}

void fill_input(const CollectiveShape& shape, const Tensor& input) {
  const auto copy = [](const Tensor& to, const Tensor& values) { to.copy_(values); };
  switch (shape.collective) {
    case Collective::all_reduce:
    case Collective::reduce_scatter:
      return part_of_sum(shape, input).walk(input, 0, copy);
    case Collective::all_to_all: {
      const int64_t row = shape.numel / shape.world_size;
      for (const int to : c10::irange(shape.world_size)) {
        moved(int64_t{shape.rank} * shape.world_size + to, input).walk(input.narrow(0, to * row, row), 0, copy);
      }
      return;
    }
    default:
      return moved(shape.rank, input).walk(input, 0, copy);
  }
}

void check_output(const CollectiveShape& shape, const Tensor& output) {
  switch (shape.collective) {
    case Collective::all_reduce:
      return check_part(shape, output, output, sum_of_all(shape, output));
    case Collective::reduce_scatter:
      return check_part(shape, output, output, sum_of_all(shape, output), shape.rank * output.numel());
    case Collective::broadcast:
      return check_part(shape, output, output, moved(0, output));
    default:
      break;
  }
  const int64_t row = shape.numel / shape.world_size;
  const bool to_all = shape.collective == Collective::all_gather;
  for (const int from : c10::irange(shape.world_size)) {
    const int64_t source = to_all ? from : int64_t{from} * shape.world_size + shape.rank;
    check_part(shape, output, output.narrow(0, from * row, row), moved(source, output));
  }
}

double time_calls(Group& group, const std::function<void()>& call, int64_t calls, const std::function<void()>& finish) {
  group.barrier(kSite);
  const auto begin = steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) call();
  finish();
  return std::chrono::duration<double>(steady_clock::now() - begin).count() / static_cast<double>(calls);
}

int64_t calls_for(int64_t bytes) { return std::clamp<int64_t>((16 << 20) / bytes, 1, 200); }

CollectiveBench::CollectiveBench(const World& world, at::ScalarType dtype, at::Device device, int64_t max_bytes,
                                 bool shared_memory)
    : board_(std::make_shared<world::FailureBoard>(world, "bench/board")),
      host_(host::Host::find(world, "bench/host", true, board_)),
      group_(world, comm::Team::whole(world), "bench/group",
             {.timeout = kTimeout,
              .board = board_,
              .host = shared_memory ? host_ : nullptr,
              .on_device = !device.is_cpu()}),
      control_(world, comm::Team::whole(world), "bench/control",
               {.timeout = kTimeout, .board = board_, .host = host_}) {
  if (world.size < 2) {
    throw ConfigError("a benchmark of collectives needs 2 ranks or more, got 1; start it with a launcher");
  }
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  const int64_t numel = rounded(max_bytes) / static_cast<int64_t>(c10::elementSize(dtype));
  input_ = at::zeros({numel}, options);
  output_ = at::zeros({numel}, options);
}

int64_t CollectiveBench::rounded(int64_t bytes) const {
  const int64_t step = kCacheLine * group_.size();
  return std::max(bytes / step, int64_t{1}) * step;
}

void CollectiveBench::call(const CollectiveShape& shape) {
  const Tensor in = input(shape), out = output(shape);
  Pending pending;
  switch (shape.collective) {
    case Collective::all_reduce: {
      const int64_t slice = shape.numel / shape.world_size;
      const Tensor own = out.narrow(0, shape.rank * slice, slice);
      pending = group_.reduce_scatter(own, in);
      group_.wait(pending, kSite);
      pending = group_.all_gather(out, own);
      break;
    }
    case Collective::all_gather:
      pending = group_.all_gather(out, in);
      break;
    case Collective::reduce_scatter:
      pending = group_.reduce_scatter(out, in);
      break;
    case Collective::all_to_all:
      pending = group_.all_to_all(out, in);
      break;
    case Collective::broadcast:
      pending = group_.broadcast(out, 0);
      break;
  }
  group_.wait(pending, kSite);
}

void CollectiveBench::verify(const CollectiveShape& shape) {
  fill_input(shape, input(shape));
  output(shape).zero_();
  if (shape.collective == Collective::broadcast && shape.rank == 0) output(shape).copy_(input(shape));
  call(shape);
  check_output(shape, output(shape));
}

CollectiveTimes CollectiveBench::measure(Collective collective, int64_t bytes, int warmups, int trials) {
  try {
    return measure_checked(collective, bytes, warmups, trials);
  } catch (const std::exception& error) {
    board_->report_failure("failed in a benchmark: " + std::string(error.what()).substr(0, 300));
    throw;
  }
}

CollectiveTimes CollectiveBench::measure_checked(Collective collective, int64_t bytes, int warmups, int trials) {
  CollectiveTimes times{.bytes = rounded(bytes)};
  const int64_t numel = times.bytes / input_.element_size();
  TORCH_CHECK_VALUE(numel <= input_.numel(), bytes, " bytes: the benchmark was made for ", input_.nbytes());
  const CollectiveShape shape{collective, group_.index(), group_.size(), numel};
  verify(shape);
  for (int i = 0; i < warmups; ++i) call(shape);
  const int64_t calls = calls_for(times.bytes);
  const auto finish = [device = input_.device()] {
    if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  };
  for (int i = 0; i < trials; ++i) {
    times.seconds.push_back(time_calls(
        control_, [&] { call(shape); }, calls, finish));
  }
  times.seconds = slowest(times.seconds);
  return times;
}

std::vector<double> CollectiveBench::slowest(const std::vector<double>& seconds) {
  const auto trials = static_cast<int64_t>(seconds.size());
  const Tensor own = at::empty({trials}, at::kDouble), all = at::empty({group_.size() * trials}, at::kDouble);
  std::copy(seconds.begin(), seconds.end(), own.mutable_data_ptr<double>());
  auto pending = control_.all_gather(all, own);
  control_.wait(pending, kSite);
  const Tensor most = std::get<0>(all.view({group_.size(), trials}).max(0));
  return {most.const_data_ptr<double>(), most.const_data_ptr<double>() + trials};
}

}  // namespace deeptide::bench
