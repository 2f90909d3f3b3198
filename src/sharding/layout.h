// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Decides which parameters share a unit and where each lies in its flat buffer: pure arithmetic, equal on every rank.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace deeptide::sharding {

/// One logical parameter as the layout sees it.
struct ParameterSpec {
  std::string name;
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
  bool trainable = true;
  int group = -1;  // optimizer group; -1: none (frozen)
  int kind = 0;    // parameters of different kinds share no unit
};

struct ModuleSpec {
  std::string path;
  std::string type;
};

/// A parameter's place in its unit. Units: elements.
struct Slot {
  int parameter = 0;   // index into the specs
  int64_t offset = 0;  // a multiple of 64 bytes
  int64_t numel = 0;
};

struct UnitLayout {
  std::string name;  // "h.3", "wte … wpe"
  at::ScalarType dtype = at::kFloat;
  bool trainable = true;
  std::vector<Slot> slots;
  int64_t used = 0;   // elements that parameters take, without padding
  int64_t numel = 0;  // num_shards * shard
  int64_t shard = 0;  // elements per rank: a multiple of 64 bytes
  int copies = 1;     // how many ranks have each slice, of those that reduce the unit
};

/// Elements of one rank's shards of all units.
int64_t shard_numel(const std::vector<const UnitLayout*>& units);

struct LayoutOptions {
  int num_shards = 1;             // size of the team over which units are sharded
  int64_t max_unit_numel = 0;     // 0: only the repeated block limits a unit; a larger single parameter stays whole
  std::vector<int> by_kind = {};  // `num_shards` of parameters of each kind; of those beyond: the above
};

/// Cuts the parameters, in the given order, into units. Each repeated block (an outermost module of a numbered
/// container of two or more like children) is one unit. Parameters between blocks are grouped up to a block's size. A
/// unit has one dtype, one trainable flag and one kind, so a block may give several units. Deterministic.
std::vector<UnitLayout> build_layout(const std::vector<ParameterSpec>& parameters,
                                     const std::vector<ModuleSpec>& modules, const LayoutOptions& options);

}  // namespace deeptide::sharding
