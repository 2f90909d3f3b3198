// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The gate: every operator that receives a parameter whose values may be elsewhere, or a view of one, passes here.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace deeptide::sharding {

class Gatekeeper;
struct Parameter;

/// One parameter of an operator in flight.
struct Use {
  Parameter* parameter = nullptr;
  Gatekeeper* keeper = nullptr;
  bool write = false;
};

/// Decides when an operator that uses parameters of one engine may run. Thread-safe.
class Gatekeeper {
 public:
  Gatekeeper();
  Gatekeeper(const Gatekeeper&) = delete;
  virtual ~Gatekeeper() = default;

  /// Returns when the parameters hold their values. Errors: CommError, with nothing held.
  virtual void acquire(c10::ArrayRef<Use> uses) = 0;
  /// Follows each `acquire` that returned, after the operator has ended.
  virtual void release(c10::ArrayRef<Use> uses, bool succeeded) = 0;
  /// Whether a parameter has memory between `acquire` and `release` only. Operators that make views then pass at once;
  /// elsewhere they wait, since a view may be read past all operators.
  virtual bool lends() const = 0;
  /// Grows with age, equally on all ranks.
  int64_t id() const { return id_; }

 private:
  const int64_t id_;
};

/// While one of these lives, the gate looks at operators for the sake of its keeper; RAII.
class Watch {
 public:
  explicit Watch(const Gatekeeper& keeper);
  Watch(const Watch&) = delete;
  ~Watch();

 private:
  bool views_;
};

/// Registers a storage with the gate; RAII. The registry holds the storage, so no other storage gets its address.
class GateEntry {
 public:
  GateEntry() = default;
  GateEntry(Parameter& parameter, Gatekeeper& keeper);
  GateEntry(GateEntry&& other) noexcept;
  GateEntry& operator=(GateEntry&& other) noexcept;
  ~GateEntry();

 private:
  const void* storage_ = nullptr;
};

/// Does what the gate does for an operator around `work`, which reads `tensors` by their addresses and writes those of
/// `written`: a kernel that a compiler made of many operators. Operators within pass at once.
/// Errors: what `work` throws; CommError, before it runs.
void run_as_operator(c10::ArrayRef<at::Tensor> tensors, const std::vector<bool>& written,
                     const std::function<void()>& work);

/// Names the unit of a parameter that is lent, or of a view of one, as long as its engine lives; 0 for other tensors.
uint64_t lent_unit(const at::Tensor& tensor);

/// Whether the tensor is a parameter that has memory only while an operator uses it, or a view of one.
bool is_lent(const at::Tensor& tensor);

/// Waits until a parameter in this storage holds its values, where its keeper does not lend them; else does nothing.
/// Errors: as Gatekeeper::acquire.
void wait_for_values(const c10::Storage& storage);

/// This thread's phase, for errors: "forward", "backward" or "evaluation".
const char* phase();

/// Number of operators that passed the gate in this process.
int64_t gate_count();

}  // namespace deeptide::sharding
