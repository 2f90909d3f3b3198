// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One rank of a comparison of collectives: Gloo, our shared memory on any tensors, and in place on buffers of the
// arena, as training uses it. `bench comm` starts the ranks and reads the JSON that each writes.
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <sched.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "bench/collective_bench.h"
#include "comm/group.h"
#include "deeptide/allocator.h"
#include "deeptide/world.h"
#include "device/memory/memory.h"
#include "host/exchange.h"
#include "host/transfer.h"
#include "numerics/sums/ordered_sum.h"
#include "world/failure_board.h"

namespace deeptide {
namespace {

using at::Tensor;
using bench::Collective;
using comm::Group;
using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTimeout{300'000};
constexpr double kWindow = 0.02;     // seconds
constexpr int64_t kMaxCalls = 5000;  // in a window
const comm::Site kSite{"benchmark", "a collective"};

/// The buffers of each way of doing a collective. Sizes as in nccl-tests: all that a rank receives (all-gather), all
/// that it contributes (reduce-scatter, all-reduce).
struct Bench {
  explicit Bench(const World& w, int64_t max_bytes)
      : world(w),
        shared(w, at::kFloat, at::kCPU, max_bytes),
        board(std::make_shared<world::FailureBoard>(w, "board")),
        host(host::Host::find(w, "host", true)),
        gloo(w, comm::Team::whole(w), "gloo", {.timeout = kTimeout, .board = board}),
        control(w, comm::Team::whole(w), "control", {.timeout = kTimeout, .board = board, .host = host}),
        ledger(std::make_shared<device::Ledger>()),
        input(flat(max_bytes)),
        output(flat(max_bytes)) {
    TORCH_CHECK(host->holds_all() && host->size() > 1, "needs 2 ranks or more on one host");
    c10d_gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>("direct", w.store),
                                                            w.rank, w.size, gloo_options());
    // The results that all ranks read, and two alternating buckets per rank: while one is read the other is filled.
    std::string why_not;
    arena = host::Arena::create(*host, max_bytes, 2 * max_bytes + (4 << 20), why_not);
    TORCH_CHECK(arena, "no shared memory: ", why_not);
    exchange = std::make_unique<host::Exchange>(host, arena);
    results = arena->at(0, max_bytes / 4, at::kFloat);
    for (Tensor& bucket : buckets) {
      bucket = arena->allocate(ledger, device::Role::communication, max_bytes).view(at::kFloat).zero_();
    }
    input.zero_();
    output.zero_();
  }

  static c10::intrusive_ptr<c10d::ProcessGroupGloo::Options> gloo_options() {
    auto options = c10d::ProcessGroupGloo::Options::create(kTimeout);
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    return options;
  }
  Tensor flat(int64_t bytes) const {
    return device::allocate_flat(ledger, device::Role::communication, bytes / 4, at::kFloat, at::kCPU);
  }

  bench::CollectiveShape shape(Collective collective, int64_t n) const {
    return {collective, world.rank, world.size, n};
  }

  World world;
  bench::CollectiveBench shared;  // through slots in shared memory, on any tensors
  std::shared_ptr<world::FailureBoard> board;
  std::shared_ptr<host::Host> host;
  Group gloo, control;
  c10::intrusive_ptr<c10d::Backend> c10d_gloo;
  std::shared_ptr<device::Ledger> ledger;
  std::shared_ptr<host::Arena> arena;
  std::unique_ptr<host::Exchange> exchange;
  Tensor input, output, results;
  std::array<Tensor, 2> buckets;
  std::array<uint32_t, 2> offers{};
  int64_t num_offers = 0;
  Tensor squares = at::zeros({1}, at::kDouble);
};

/// A slice of `whole` for each rank: this rank's.
Tensor own(const Bench& b, const Tensor& whole) {
  const int64_t n = whole.numel() / b.world.size;
  return whole.narrow(0, b.world.rank * n, n);
}

Tensor first_slice(const Bench& b, const Tensor& whole) { return whole.narrow(0, 0, whole.numel() / b.world.size); }
Tensor in_output(Bench& b, int64_t n) { return b.output.narrow(0, 0, n); }
Tensor in_results(Bench& b, int64_t n) { return b.results.narrow(0, 0, n); }

void all_gather_gloo(Bench& b, int64_t n) {
  Tensor output = in_output(b, n), input = first_slice(b, b.input.narrow(0, 0, n));
  b.c10d_gloo->_allgather_base(output, input)->wait(kTimeout);
}

void reduce_scatter_gloo(Bench& b, int64_t n) {
  Tensor output = first_slice(b, in_output(b, n)), input = b.input.narrow(0, 0, n);
  b.c10d_gloo->_reduce_scatter_base(output, input)->wait(kTimeout);
}

void all_reduce_gloo(Bench& b, int64_t n) {
  std::vector<Tensor> tensors{in_output(b, n)};
  b.c10d_gloo->allreduce(tensors)->wait(kTimeout);
}

/// Does what our groups do without shared memory: the sum is taken here, in rank order.
void reduce_scatter_ordered(Bench& b, int64_t n) {
  const Tensor received = in_output(b, n);
  auto pending = b.gloo.all_to_all(received, b.input.narrow(0, 0, n));
  b.gloo.wait(pending, kSite);
  numerics::ordered_sum(received.chunk(b.world.size), 1.0, true, own(b, in_results(b, n)), b.squares);
}

/// A slice is written once, where all read it.
void all_gather_in_place(Bench& b, int64_t n) {
  const Tensor slice = own(b, in_results(b, n));
  host::Destination(slice).write(0, host::readable(b.input), static_cast<int64_t>(slice.nbytes()));
  b.control.barrier(kSite);
}

/// Everybody's slice is read and summed where it lies.
void sum_in_place(Bench& b, int64_t n, const Tensor& sum) {
  const auto turn = static_cast<size_t>(b.num_offers % 2);
  const auto begin = steady_clock::now();
  while (b.num_offers >= 2 && !b.exchange->all_read(b.offers[turn])) {
    TORCH_CHECK(steady_clock::now() - begin < kTimeout, "a rank has not read a bucket for ", kTimeout.count(), " ms");
    sched_yield();
  }
  auto offer = b.exchange->offer(b.buckets[turn].narrow(0, 0, n));
  b.offers[turn] = offer.number;
  ++b.num_offers;
  auto pending = b.control.track(offer.operation, "reduce-scatter", n * 4);
  b.control.wait(pending, kSite);
  const auto rows = b.exchange->rows(offer.number, b.world.rank * sum.numel(), sum.numel(), at::kFloat);
  numerics::ordered_sum(rows, 1.0, true, sum, b.squares);
  b.exchange->set_read(offer.number);
}

void reduce_scatter_in_place(Bench& b, int64_t n) { sum_in_place(b, n, first_slice(b, in_output(b, n))); }

void all_reduce_in_place(Bench& b, int64_t n) {
  sum_in_place(b, n, own(b, in_results(b, n)));
  b.control.barrier(kSite);
}

struct Way {
  Collective collective;
  const char* path;
  std::function<void(Bench&, int64_t)> run;
  std::function<Tensor(Bench&, int64_t)> result;
};

Way through_slots(Collective collective) {
  return {collective, "shared", [=](Bench& b, int64_t n) { b.shared.call(b.shape(collective, n)); },
          [=](Bench& b, int64_t n) { return b.shared.output(b.shape(collective, n)); }};
}

std::vector<Way> ways() {
  const auto first = [](Bench& b, int64_t n) { return first_slice(b, in_output(b, n)); };
  const auto own_result = [](Bench& b, int64_t n) { return own(b, in_results(b, n)); };
  return {
      {Collective::all_gather, "Gloo", all_gather_gloo, in_output},
      through_slots(Collective::all_gather),
      {Collective::all_gather, "in place", all_gather_in_place, in_results},
      {Collective::reduce_scatter, "Gloo", reduce_scatter_gloo, first},
      {Collective::reduce_scatter, "Gloo, ordered", reduce_scatter_ordered, own_result},
      through_slots(Collective::reduce_scatter),
      {Collective::reduce_scatter, "in place", reduce_scatter_in_place, first},
      {Collective::all_reduce, "Gloo", all_reduce_gloo, in_output},
      through_slots(Collective::all_reduce),
      {Collective::all_reduce, "in place", all_reduce_in_place, in_results},
  };
}

void verify(Bench& b, const Way& way, int64_t n) {
  const bench::CollectiveShape shape = b.shape(way.collective, n);
  b.control.barrier(kSite);  // all have read the buckets of the way before
  for (const Tensor& input : {b.input, b.shared.input(shape), b.buckets[0], b.buckets[1]}) {
    bench::fill_input(shape, input.narrow(0, 0, shape.input_numel()));
  }
  in_output(b, n).copy_(b.input.narrow(0, 0, n));  // the input too where the way works in place
  own(b, in_results(b, n)).zero_();
  b.control.barrier(kSite);
  way.run(b, n);
  bench::check_output(shape, way.result(b, n));
  b.control.barrier(kSite);
}

/// Seconds a call. Ranks that share cores need some milliseconds to fall into step after another way of doing it: calls
/// that tell how many fit into kWindow go before, untimed.
double measure_once(Bench& b, const Way& way, int64_t n) {
  const auto time = [&](int64_t calls) {
    // An all-reduce in place grows from call to call: from zeros it stays finite.
    in_output(b, n).zero_();
    return bench::time_calls(
        b.control, [&] { way.run(b, n); }, calls);
  };
  const double first = b.shared.slowest({time(bench::calls_for(n * 4))})[0];
  return time(std::clamp<int64_t>(static_cast<int64_t>(kWindow / first), 1, kMaxCalls));
}

/// All ways by turns, `repetitions` times.
nlohmann::json measure(Bench& b, int64_t bytes, int repetitions) {
  const int64_t n = bytes / 4;
  const auto all = ways();
  std::vector<std::vector<double>> seconds(all.size());
  for (const Way& way : all) verify(b, way, n);
  for (int i = 0; i < repetitions; ++i) {
    for (size_t w = 0; w < all.size(); ++w) seconds[w].push_back(measure_once(b, all[w], n));
  }
  auto rows = nlohmann::json::array();
  for (size_t w = 0; w < all.size(); ++w) {
    rows.push_back({{"collective", bench::name_of(all[w].collective)},
                    {"path", all[w].path},
                    {"bytes", bytes},
                    {"seconds", seconds[w]}});
  }
  return rows;
}

const char* argument(int argc, char** argv, const std::string& name) {
  for (int i = 1; i + 1 < argc; i += 2) {
    if (argv[i] == "--" + name) return argv[i + 1];
  }
  TORCH_CHECK(false, "--", name, " is missing; comm.py calls: --sizes BYTES,… --repetitions N --result FILE");
}

void run(int argc, char** argv) {
  at::set_num_threads(1);   // the ranks are the parallelism
  install_cpu_allocator();  // as the engine does
  std::vector<int64_t> sizes;
  std::stringstream words(argument(argc, argv, "sizes"));
  for (std::string word; std::getline(words, word, ',');) sizes.push_back(std::stoll(word));
  const int repetitions = std::atoi(argument(argc, argv, "repetitions"));
  Bench bench(init_distributed({.timeout = kTimeout}), *std::max_element(sizes.begin(), sizes.end()));
  auto rows = nlohmann::json::array();
  for (const int64_t bytes : sizes) {
    TORCH_CHECK(bytes > 0 && bytes % (64 * bench.world.size) == 0, bytes, " bytes: expected a multiple of 64 per rank");
    for (auto& row : measure(bench, bytes, repetitions)) rows.push_back(std::move(row));
  }
  std::ofstream(argument(argc, argv, "result")) << rows;
  bench.control.barrier(kSite);
}

}  // namespace
}  // namespace deeptide

int main(int argc, char** argv) {
  try {
    deeptide::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
  return 0;
}
