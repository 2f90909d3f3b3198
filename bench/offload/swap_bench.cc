// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Moves optimizer states between files and memory as a step does, without the step: three buffers, block by block, each
// next block announced. `bench swap` runs it beside fio and reads the JSON that it prints.
#include <ATen/ops/rand.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "device/memory/memory.h"
#include "tiers/offload.h"

namespace deeptide {
namespace {

using std::chrono::steady_clock;
using tiers::Access;
using tiers::Block;

constexpr int kKinds = 3;  // a master and two moments

tiers::Access access_of(const std::string& pattern) {
  if (pattern == "read") return Access::read;
  if (pattern == "write") return Access::write;
  TORCH_CHECK(pattern == "update", "the pattern is '", pattern, "', expected read, write or update");
  return Access::update;
}

/// One pass over all buffers; ends when every changed block is in its file. `content`: undefined, or what each block
/// is set to.
void pass(const std::array<tiers::Buffer, kKinds>& buffers, Access access, const at::Tensor& content = {}) {
  for_each_block(buffers[0], {0, buffers[0].numel()}, [&](Block block) {
    const int64_t next = block.begin + block.count;
    std::array<tiers::Lease, kKinds> leases;
    for (size_t kind = 0; kind < kKinds; ++kind) {
      leases[kind] = buffers[kind].lease(block, access);
      if (content.defined()) leases[kind].tensor().copy_(content.narrow(0, 0, block.count));
      if (access != Access::write && next < buffers[kind].numel()) buffers[kind].prefetch({next, 1});
    }
  });
  for (const auto& buffer : buffers) buffer.write_behind();
}

int run(const std::string& folder, double gib, int slots, const std::string& pattern) {
  const Access access = access_of(pattern);
  const auto numel = static_cast<int64_t>(gib * (1 << 30) / kKinds / sizeof(float));
  auto ledger = std::make_shared<device::Ledger>();
  double seconds = 0.0;
  std::string text;
  {
    tiers::Offload files({{folder}, 1.0, slots}, ledger, device::Role::optimizer, "the benchmark");
    std::array<tiers::Buffer, kKinds> buffers;
    for (auto& buffer : buffers) buffer = files.place(numel, at::kFloat);
    // A hole is not read from the drive, and a drive may compress zeros: files and memory get random bits, as fio's
    // have.
    pass(buffers, Access::write, at::rand({buffers[0].block_numel()}));
    const auto began = steady_clock::now();
    pass(buffers, access);
    // To read the first blocks again waits for the last writes: they had the slots.
    if (access != Access::read) {
      for (int64_t block = 0; block < slots; ++block) {
        for (const auto& buffer : buffers) buffer.lease(buffer.block(block % buffer.num_blocks()), Access::read);
      }
    }
    seconds = std::chrono::duration<double>(steady_clock::now() - began).count();
    text = files.text();
  }
  const double bytes = static_cast<double>(numel) * sizeof(float) * kKinds * (access == Access::update ? 2 : 1);
  std::cout << nlohmann::json{{"bytes", bytes}, {"seconds", seconds}, {"text", text}} << '\n';
  return 0;
}

}  // namespace
}  // namespace deeptide

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: deeptide_swap_bench FOLDER GIB SLOTS read|write|update\n";
    return 2;
  }
  return deeptide::run(argv[1], std::atof(argv[2]), std::atoi(argv[3]), argv[4]);
}
