// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The gate: every operator that receives a sharded parameter, or a view of one, passes here and finds its unit whole.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace deeptide::sharding {

class Residency;
struct Parameter;

/// Registers a storage with the gate; RAII. The registry holds the storage, so no other storage gets its address.
class GateEntry {
 public:
  GateEntry() = default;
  GateEntry(Parameter& parameter, Residency& residency);
  GateEntry(GateEntry&& other) noexcept;
  GateEntry& operator=(GateEntry&& other) noexcept;
  ~GateEntry();

 private:
  const void* storage_ = nullptr;
};

/// Number of operators that passed the gate in this process.
int64_t gate_count();

}  // namespace deeptide::sharding
