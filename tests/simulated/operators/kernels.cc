// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The kernels for GPUs as the simulated accelerator's: their bodies on the host, as tasks that say what they touch.
#include <torch/library.h>

#include <map>

#include "numerics/kernels/copy_kernel.cu"
#include "numerics/sums/sum_kernel.cu"
#include "optim/kernels/lamb_kernel.cu"
#include "optim/kernels/step_kernel.cu"
#include "simulated/operators/operands.h"

namespace deeptide::simulated {
namespace {

using numerics::kernel::Numbers;
using numerics::kernel::NumberType;

/// The memory of one launch: addresses as tensors carry them become those that a task reads and writes.
class Memory {
 public:
  template <typename T>
  void read(const T*& data, int64_t bytes) {
    data = static_cast<const T*>(use(data, bytes, false));
  }
  template <typename T>
  void write(T*& data, int64_t bytes) {
    data = static_cast<T*>(use(data, bytes, true));
  }
  /// Reads and writes it.
  template <typename T>
  void update(T*& data, int64_t bytes) {
    use(data, bytes, false);
    write(data, bytes);
  }
  void read(Numbers& numbers, int64_t count) {
    const void* data = numbers.data;
    read(data, count * size_of(numbers.type));
    numbers.data = const_cast<void*>(data);
  }
  void write(Numbers& numbers, int64_t count) { write(numbers.data, count * size_of(numbers.type)); }
  void update(Numbers& numbers, int64_t count) { update(numbers.data, count * size_of(numbers.type)); }

  void read(numerics::kernel::Rows& rows, int64_t count) {
    for (int row = 0; row < rows.count; ++row) read(rows.data[row], count * size_of(rows.type));
  }
  void read(numerics::kernel::Pieces& all) {
    for (int i = 0; i < all.pieces; ++i) read(all.data[i], all.count[i] * size_of(all.type));
  }

  static int64_t size_of(NumberType type) { return type == NumberType::fp32 ? 4 : 2; }

  void run(const char* name, std::function<void()> task) {
    with_torch_errors([&] {
      Cost cost;
      for (const Use& each : uses_) cost.bytes += each.end - each.begin;
      Machine::instance().enqueue(current_stream(), {name, std::move(uses_), std::move(task), cost});
    });
  }

 private:
  void* use(const void* data, int64_t bytes, bool write) {
    if (data == nullptr || bytes == 0) return nullptr;
    const BlockRef block = Machine::instance().find(data);
    TORCH_CHECK(block, "simulated device: a kernel is given memory that is not the device's");
    const auto begin = static_cast<size_t>(static_cast<const char*>(data) - block->shown);
    uses_.push_back({block, begin, begin + static_cast<size_t>(bytes), write});
    return block->real + begin;
  }

  std::vector<Use> uses_;
};

template <typename Arguments>
Arguments copied(int64_t address) {
  return *reinterpret_cast<const Arguments*>(address);
}

void step(int64_t address) {
  auto own = copied<optim::StepArguments>(address);
  Memory memory;
  memory.read(own.gradient, own.count);
  memory.read(own.pieces);
  memory.update(own.master, own.count);
  for (Numbers& state : own.states) {
    if (state.data != nullptr) memory.update(state, own.count);
  }
  memory.write(own.param, own.count);
  memory.update(own.low, own.count * int64_t{sizeof(uint16_t)});
  memory.update(own.above, (own.count + 7) / 8);
  memory.run("step kernel", [own] { optim::host_kernels::step(own, nullptr); });
}

void lamb(int64_t address) {
  auto own = copied<optim::LambArguments>(address);
  const int64_t bytes = own.count * int64_t{sizeof(float)};
  Memory memory;
  memory.read(own.gradient);
  memory.update(own.master, bytes);
  memory.update(own.exp_avg, bytes);
  memory.update(own.exp_avg_sq, bytes);
  memory.update(own.update, bytes);
  memory.write(own.param, own.count);
  memory.run("lamb kernel", [own] { optim::host_kernels::lamb(own, nullptr); });
}

void sum(int64_t address) {
  auto own = copied<numerics::kernel::SumArguments>(address);
  Memory memory;
  memory.read(own.rows, own.count);
  memory.read(own.pieces);
  own.overwrite ? memory.write(own.accumulator, own.count) : memory.update(own.accumulator, own.count);
  memory.update(own.scratch, numerics::kernel::SumArguments::num_scratch(own.count) * int64_t{sizeof(double)});
  memory.update(own.sum_of_squares, sizeof(double));
  memory.run("sum kernel", [own] { numerics::host_kernels::sum(own, nullptr); });
}

void copy(int64_t address) {
  auto own = copied<numerics::kernel::CopyArguments>(address);
  Memory memory;
  for (int pair = 0; pair < own.pairs; ++pair) {
    const int64_t count = own.begin[pair + 1] - own.begin[pair];
    memory.read(own.from[pair], count);
    memory.write(own.to[pair], count);
  }
  memory.run("copy kernel", [own] { numerics::host_kernels::copy(own, nullptr); });
}

}  // namespace

TORCH_LIBRARY(deeptide_kernels, m) {
  m.def("available() -> bool", [] { return Machine::instance().has_kernels(); });
  m.def("step(int arguments) -> ()", &step);
  m.def("lamb(int arguments) -> ()", &lamb);
  m.def("sum(int arguments) -> ()", &sum);
  m.def("copy(int arguments) -> ()", &copy);
}

}  // namespace deeptide::simulated
