// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A unit: consecutive parameters in one flat buffer that comes whole and goes again; each parameter's storage points
// into it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/team.h"
#include "device/memory.h"
#include "device/shared_memory.h"
#include "sharding/layout.h"

namespace deeptide::sharding {

/// A living engine's unit owns this storage.
bool is_bound(const c10::Storage& storage);

class Residency;
class Unit;

/// A logical parameter: all tensors that share its memory (tied ones under several names), and where it lies.
struct Parameter {
  std::string name;
  std::vector<std::string> aliases;  // further names
  std::vector<at::Tensor> tensors;   // distinct TensorImpls over the one storage; the first is the name's
  int64_t offset = 0;                // in the unit, elements
  int64_t numel = 0;
  int group = -1;
  Unit* unit = nullptr;
  c10::intrusive_ptr<c10::StorageImpl> storage;  // ours: views keep it, the registry finds us by it
  uint32_t version = 0;                          // current_version() after our last own write
  bool rewritten = false;                        // written by others than the engine: the master must follow
  int pins = 0;                                  // operators in flight that use it (sharded units)

  /// Counts the writes through any of its tensors.
  uint32_t current_version() const;
  /// The same element order in another buffer: a view of `flat` with this parameter's sizes and strides.
  at::Tensor view_of(const at::Tensor& flat) const;
};

/// Where a unit's parameters lie, and so who makes them whole, who publishes them and who sees what others write.
enum class UnitMemory : uint8_t {
  whole,    // on each rank (stages 0-2, small units): published by a gather, others' writes show in version counters
  shared,   // once for all ranks of a host: published by a barrier, others' writes show in private pages
  sharded,  // a slice per rank (stage 3): gathered when an operator needs them, the gate sees others' writes
};

/// The teams of a unit, and its memory. All ranks agree on it.
struct UnitPlacement {
  UnitMemory memory = UnitMemory::whole;
  comm::Team shard_over;   // each rank of it owns one slice
  comm::Team reduce_over;  // gradients are summed over it
};

/// Flat memory of one UnitLayout. Even while a sharded unit is whole, a parameter's storage has its memory only while
/// an operator in flight has it open: so raw access always throws our text, and never works by luck today and dangles
/// tomorrow. Not thread-safe: Residency guards the sharded ones.
class Unit {
 public:
  Unit(int index, UnitLayout layout, std::vector<Parameter> parameters, UnitPlacement placement);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;
  /// Parameters of a unit kept whole stay usable; sharded ones throw a text from now on.
  ~Unit();

  /// Copies the parameters' present values into the flat buffer `whole` (numel,); gaps become zero.
  void pack(at::Tensor whole) const;
  /// Takes the shard out of `whole`, moves the parameters' storages over, and, when sharded, lets `whole` go.
  void adopt(at::Tensor whole, const std::shared_ptr<device::Ledger>& ledger);

  /// The whole lies once in memory that all ranks of the host share: `shard` is this rank's slice there, `view` what
  /// this rank's program sees of it: writes of its own stay its own until `take_private_writes`.
  void adopt_shared(at::Tensor shard, std::shared_ptr<device::PrivateView> view);
  bool has_private_writes() const;
  /// Copies what this rank's program wrote, as far as it lies in this rank's slice, into the shared memory and drops
  /// the rest. All ranks must be idle. Does nothing to units that are not shared.
  void take_private_writes();
  /// Marks parameters as rewritten that a version counter shows to have been written by others than the engine.
  void note_external_writes();
  void forget_external_writes();

  /// Lends the unit `whole` (numel,), which holds its values; `detach` gives it back for reuse.
  void attach(at::Tensor whole) { whole_ = std::move(whole); }
  at::Tensor detach() { return std::move(whole_); }
  bool is_whole() const { return whole_.defined(); }
  bool is_pinned() const { return pins_ > 0; }

  /// Points the storage of `p` into the whole buffer until as many calls of `close`.
  void open(Parameter& p);
  void close(Parameter& p);

  /// After an operator wrote parameter `p` in the whole buffer: brings this rank's slice of it into the shard.
  void write_back(Parameter& p);

  int index() const { return index_; }
  const UnitLayout& layout() const { return layout_; }
  UnitMemory memory() const { return placement_.memory; }
  const comm::Team& shard_over() const { return placement_.shard_over; }
  const comm::Team& reduce_over() const { return placement_.reduce_over; }
  /// What it takes of this rank's share of memory for good: its slice, or all of it.
  int64_t resident_bytes() const;
  std::vector<Parameter>& parameters() { return parameters_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  /// This rank's slice (shard,): a view of the whole buffer when kept whole, memory of its own when sharded, of the
  /// host when shared.
  const at::Tensor& shard() const { return shard_; }
  const at::Tensor& whole() const { return whole_; }
  int64_t numel() const { return layout_.numel; }
  int64_t shard_begin() const { return placement_.shard_over.index() * layout_.shard; }
  /// The parameter's range of elements [first, last) that lies in this rank's shard, in unit coordinates; empty if
  /// none.
  std::pair<int64_t, int64_t> owned_range(const Parameter& p) const;

 private:
  void point_into(const at::Tensor& whole);

  int index_;
  UnitLayout layout_;
  std::vector<Parameter> parameters_;
  UnitPlacement placement_;
  int pins_ = 0;
  at::Tensor whole_;
  at::Tensor shard_;
  std::shared_ptr<device::PrivateView> view_;
};

/// Puts or takes the extra dispatch key on a tensor: the one place that names it.
void set_gate_key(const at::Tensor& tensor, bool on);
bool has_gate_key(const at::Tensor& tensor);

}  // namespace deeptide::sharding
