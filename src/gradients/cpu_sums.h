// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sums of an accelerator that leave for its host as soon as they are there.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "device/lane.h"
#include "device/memory/memory.h"
#include "device/memory/page_locked.h"
#include "gradients/unit_gradient.h"

namespace deeptide::gradients {

/// Sums in page-locked memory of the host. The device changes one at a time, whole, in a ring of its own memory; what
/// changed leaves on a lane of its own. The first elements of a sum may stay on the device. Used by one thread at a
/// time.
class CpuSums {
 public:
  /// A unit's sum. Units: elements.
  struct Cut {
    int64_t numel = 0;
    int64_t stays = 0;  // the first ones; all: the unit has no sum here
  };

  /// `cuts`: by unit.
  CpuSums(std::shared_ptr<device::Ledger> ledger, at::Device device, std::vector<Cut> cuts, at::ScalarType dtype);
  ~CpuSums();
  CpuSums(const CpuSums&) = delete;
  CpuSums& operator=(const CpuSums&) = delete;

  bool has(int unit) const { return cuts_[unit].stays < cuts_[unit].numel; }
  /// Calls `change` with the sum (numel,) on the device, as work of the current lane; what it holds then leaves behind
  /// that work. `first`: its values are undefined at first.
  void change(int unit, bool first, const std::function<void(const at::Tensor& sum)>& change);
  /// The part that stays, and the part that is on the host or on its way there.
  UnitGradient gradient(int unit);
  /// The sum on the device (numel,), for work of the current lane only. Valid until another two are asked for, or one
  /// changes: so one is brought while the one before it is used.
  at::Tensor lend(int unit);
  /// Gives the device's memory back, which the next change takes anew: what stays is lost. The host's memory is kept.
  void release_memory();

  /// Units: bytes.
  struct Forecast {
    int64_t on_device = 0;  // the ring, and what stays
    int64_t on_host = 0;
  };
  static Forecast forecast(const std::vector<Cut>& cuts, at::ScalarType dtype);

 private:
  /// Memory of the device for one sum at a time.
  struct Slot {
    int64_t numel = 0;
    at::Tensor memory;        // undefined: has been given back
    device::Mark free_after;  // passed: what was there has left
    std::optional<device::Lane> lent_to;
    int64_t last_use = 0;
  };

  Slot& take_slot(int64_t numel);
  at::Tensor allocate(int64_t numel) const;
  void bring(int unit, const Slot& slot);
  void leave(int unit, const Slot& slot);
  void order_before_frees();

  std::shared_ptr<device::Ledger> ledger_;
  at::Device device_;
  std::vector<Cut> cuts_;
  at::ScalarType dtype_;
  device::Lane home_;      // on which memory of the device is taken and freed
  device::Lane out_, in_;  // to the host, and back where a sum is added to
  std::optional<device::PageLocked> locked_;
  std::vector<std::shared_ptr<CpuPart>> on_host_;  // by unit
  std::vector<at::Tensor> stays_;                  // by unit
  std::vector<Slot> ring_;
  int64_t uses_ = 0;
};

}  // namespace deeptide::gradients
