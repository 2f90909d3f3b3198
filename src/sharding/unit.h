// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A unit: consecutive parameters in one flat buffer, gathered and released together. Each parameter's storage points
// into it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/team.h"
#include "deeptide/tensor_slice.h"
#include "device/memory/memory.h"
#include "device/memory/shared_memory.h"
#include "sharding/layout.h"
#include "tiers/buffer.h"

namespace deeptide::sharding {

/// Whether a living engine's unit owns this storage.
bool is_bound(const c10::Storage& storage);

class Unit;

/// A further name of a parameter, and which of its tensors has it.
struct Alias {
  std::string name;
  int tensor = 0;
};

/// The elements of a tensor in its parameter's memory.
struct Order {
  at::IntArrayRef sizes, strides;
};

/// A logical parameter: all tensors that share its memory (tied ones have several names), and its place.
struct Parameter {
  std::string name;
  std::vector<Alias> aliases;
  /// Distinct TensorImpls over the one storage. The first is contiguous and has `name`; others may see the same
  /// elements in other sizes and strides (a transposed tie).
  std::vector<at::Tensor> tensors;
  int64_t offset = 0;  // in the unit, elements
  int64_t numel = 0;
  int group = -1;
  bool required_grad = true;         // when it was bound
  std::optional<TensorSlice> slice;  // of a whole one, if ranks along the tensor axis share it
  Unit* unit = nullptr;
  c10::intrusive_ptr<c10::StorageImpl> storage;  // owned: views keep it alive, the registry finds the parameter by it
  uint32_t version = 0;                          // current_version() after the engine's last write
  bool rewritten = false;                        // written outside the engine: the master must follow
  int pins = 0;                                  // operators in flight that use it (sharded units)
  std::vector<std::vector<int64_t>> sizes, strides;  // the tensors' when they were bound; empty before

  /// Counts the writes through any of its tensors.
  uint32_t current_version() const;
  /// Whether the program has given it memory of other sizes since it was bound.
  bool is_resized() const { return !sizes.empty() && tensors.front().sizes() != at::IntArrayRef(sizes.front()); }
  /// Returns the order of a tensor when it was bound: the program may have put other memory in its place for a while.
  Order order_of(int tensor) const;
  /// Returns a view of `flat`, another buffer, with sizes, strides and element order of one of the tensors.
  at::Tensor view_of(const at::Tensor& flat, int tensor = 0) const;
};

/// The home of a unit's parameters lie: how they become whole, how they are published, how foreign writes show.
enum class UnitMemory : uint8_t {
  whole,    // on each rank (stages 0-2, small units): published by a gather, foreign writes show in version counters
  shared,   // once per host: published by a barrier, foreign writes show in private pages
  sharded,  // one slice per rank (stage 3): gathered when an operator needs them, the gate sees foreign writes
};

/// The teams and the memory of a unit, equal on all ranks.
struct UnitPlacement {
  UnitMemory memory = UnitMemory::whole;
  comm::Team shard_over;   // each of its ranks owns one slice
  comm::Team reduce_over;  // gradients are summed over it: whole teams of the above, one after the other
  /// The ranks along the tensor axis whose slices make up the unit's parameters; absent: these are whole.
  std::optional<comm::Team> cut_over = {};
  int cut_ranks() const { return cut_over ? cut_over->size() : 1; }
  /// Whether this rank is the first that holds its slice: it counts the slice in norms and writes it into checkpoints.
  bool is_first_holder() const { return reduce_over.index() < shard_over.size(); }
};

/// Makes the buffer (shard,) of a sharded unit's slice: where it lies is its choice.
using ShardPlacement = std::function<tiers::Buffer(const UnitLayout& layout)>;

/// Flat memory of one UnitLayout. Even while a sharded unit is whole, a parameter's storage has memory only while an
/// operator in flight has it open. So raw access always throws our text; it never works by luck and dangles later. Not
/// thread-safe: Residency guards the sharded units.
class Unit {
 public:
  Unit(int index, UnitLayout layout, std::vector<Parameter> parameters, UnitPlacement placement);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;
  /// Leaves parameters of a whole unit usable; sharded ones throw a text afterwards.
  ~Unit();

  /// Copies the parameters' current values into the flat buffer `whole` (numel,) and zeroes the gaps.
  void pack(at::Tensor whole) const;
  /// Takes the shard from `whole`, points the parameters' storages here and, when sharded, releases `whole`. `place`:
  /// absent: a sharded unit's slice is resident on the device. Errors: as `place`.
  void adopt(at::Tensor whole, const std::shared_ptr<device::Ledger>& ledger, const ShardPlacement& place = {});

  /// Adopts memory that all ranks of the host share: `shard` is this rank's slice there, `view` is this rank's
  /// program's view of it. The program's own writes stay private until `take_private_writes`.
  void adopt_shared(at::Tensor shard, std::shared_ptr<device::PrivateView> view);
  bool has_private_writes() const;
  /// Copies this rank's private writes, within this rank's slice, into the shared memory and drops the rest. All ranks
  /// must be idle. Does nothing to units that are not shared.
  void take_private_writes();
  /// Marks as rewritten each parameter whose version counter shows a write by anything but the engine.
  void note_external_writes();
  void forget_external_writes();
  /// Counts a write of the engine: backward through a graph that saved the parameter's old values then fails, as in
  /// torch.
  void count_write(Parameter& p);
  /// Returns a parameter whose tensors no longer lie in this unit's memory; null if all do.
  const Parameter* moved(bool but_resized = false) const;

  /// Lends the unit `whole` (numel,), which holds its values; `detach` returns it for reuse.
  void attach(at::Tensor whole) { whole_ = std::move(whole); }
  at::Tensor detach() { return std::move(whole_); }
  bool is_whole() const { return whole_.defined(); }
  bool is_pinned() const { return pins_ > 0; }

  /// Points the storage of `p` into the whole buffer until `close` was called as often as `open`.
  void open(Parameter& p);
  void close(Parameter& p);

  /// Makes raw access to the parameters of a whole unit throw our text until `show`: their values are on their way.
  void hide();
  void show();
  /// May be asked by any thread.
  bool is_hidden() const { return hidden_.load(std::memory_order_acquire); }

  /// Copies this rank's slice of `p` into the shard, after an operator wrote `p`: from the whole buffer, or from `kept`
  /// (shard,), this rank's slice as it was.
  void write_back(Parameter& p, const at::Tensor& kept = {});

  int index() const { return index_; }
  const UnitLayout& layout() const { return layout_; }
  UnitMemory memory() const { return placement_.memory; }
  const comm::Team& shard_over() const { return placement_.shard_over; }
  const comm::Team& reduce_over() const { return placement_.reduce_over; }
  const std::optional<comm::Team>& cut_over() const { return placement_.cut_over; }
  bool is_first_holder() const { return placement_.is_first_holder(); }
  /// Memory that it keeps of this rank's share: what is resident of its slice, or all of it.
  int64_t resident_bytes() const;
  std::vector<Parameter>& parameters() { return parameters_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  /// This rank's slice (shard,): a view of the whole buffer when kept whole, memory or files of its own when sharded,
  /// the host's memory when shared.
  const tiers::Buffer& shard() const { return shard_; }
  /// Returns the slice (shard,) where it lies, or else copied to its place in `whole` (numel,): what a gather into
  /// `whole` takes. Errors: RuntimeError if it cannot be read.
  at::Tensor shard_for(const at::Tensor& whole) const;
  const at::Tensor& whole() const { return whole_; }
  int64_t numel() const { return layout_.numel; }
  int64_t shard_begin() const { return placement_.shard_over.index() * layout_.shard; }
  /// Returns the parameter's elements [first, last) in this rank's shard, in unit coordinates; empty if none.
  std::pair<int64_t, int64_t> owned_range(const Parameter& p) const;

 private:
  void point_into(const at::Tensor& whole);

  int index_;
  UnitLayout layout_;
  std::vector<Parameter> parameters_;
  UnitPlacement placement_;
  int pins_ = 0;
  std::atomic<bool> hidden_ = false;
  at::Tensor whole_;
  tiers::Buffer shard_;
  std::shared_ptr<device::PrivateView> view_;
};

/// The layouts of these units; a null unit has none.
std::vector<const UnitLayout*> layouts_of(const std::vector<Unit*>& units);

/// Adds or removes the extra dispatch key of a tensor. No other function names the key.
void set_gate_key(const at::Tensor& tensor, bool on);
bool has_gate_key(const at::Tensor& tensor);

}  // namespace deeptide::sharding
