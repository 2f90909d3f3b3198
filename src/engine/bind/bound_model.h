// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A model's parameters bound to units: cast, broadcast from rank 0, packed into flat memory.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "comm/group.h"
#include "deeptide/engine.h"
#include "device/memory/memory.h"
#include "engine/bind/buffer_types.h"
#include "engine/bind/channels.h"
#include "host/arena.h"
#include "sharding/unit.h"
#include "zero/states/offloaded_parameters.h"

namespace deeptide::engine {

/// A parameter by one of its names, and which of its tensors has that name. Null if unknown.
struct BoundName {
  const sharding::Parameter* parameter = nullptr;
  int tensor = 0;
};

/// Owns the units. The constructor checks everything before it changes a tensor.
class BoundModel {
 public:
  /// Collective. Lays the parameters out as `design` says; `arena`: as settled with it.
  /// The first rank's values of each unit count. Errors: ValueError as distinct_parameters.
  BoundModel(const ModelDescription& model, const Design& design, const BufferTypes& buffers,
             std::shared_ptr<host::Arena> arena, Channels& channels, const std::shared_ptr<device::Ledger>& ledger);

  /// Null: shards are in the device's memory.
  const zero::OffloadedParameters* offloaded() const { return offloaded_.get(); }
  /// Null if the ranks share no memory.
  const std::shared_ptr<host::Arena>& arena() const { return arena_; }

  std::vector<std::unique_ptr<sharding::Unit>>& units() { return units_; }
  const std::vector<std::unique_ptr<sharding::Unit>>& units() const { return units_; }
  /// Trainable units, in module order.
  std::vector<sharding::Unit*> trainable() const;
  /// By Unit::index(); null if kept whole.
  std::vector<sharding::Unit*> sharded() const;
  std::vector<const sharding::Parameter*> parameters() const;
  /// Finds a parameter by any of its names.
  BoundName find(const std::string& name) const;
  /// Finds the parameter that has this very tensor.
  BoundName find(const at::Tensor& tensor) const;
  at::Device device() const { return device_; }
  int64_t num_elements() const;
  /// Memory that parameters keep on this rank, a device's where they are on one.
  int64_t predicted_bytes() const;
  /// Memory of the host that they keep beside it.
  int64_t off_device_bytes() const;
  int64_t num_trainable() const;
  const BufferCounts& buffers() const { return buffers_; }
  /// Errors: ValueError naming a parameter whose memory was replaced since (module.to(), `.data = …`). `may_resize`:
  /// but for those that have other sizes now.
  void check_bound(bool may_resize = false) const;
  /// Before a forward or a backward. Errors: ValueError naming a parameter that has other sizes than when it was bound.
  void check_sizes() const;
  /// Errors: ValueError naming a parameter that was frozen when it was bound and requires grad now.
  void check_trained() const;
  /// Finds what the program wrote into parameters that are kept whole.
  void note_external_writes();

 private:
  void bind_apart(sharding::Unit& unit, const zero::ShardPlace& place, comm::Group& holders,
                  const std::shared_ptr<device::Ledger>& ledger, bool is_of_files);
  void bind_shared(sharding::Unit& unit, int64_t offset, const std::shared_ptr<device::Ledger>& ledger);
  void remember(const sharding::Unit& unit);

  struct Place {
    int unit = 0;
    int parameter = 0;
    int tensor = 0;
  };

  std::shared_ptr<host::Arena> arena_;
  std::unique_ptr<zero::OffloadedParameters> offloaded_;
  std::vector<std::unique_ptr<sharding::Unit>> units_;
  std::unordered_map<std::string, Place> by_name_;
  std::unordered_map<const c10::TensorImpl*, Place> by_tensor_;
  BufferCounts buffers_;
  at::Device device_ = at::kCPU;
};

}  // namespace deeptide::engine
