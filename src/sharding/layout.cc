// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds repeated blocks and packs parameters into units.
#include "sharding/layout.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "device/memory/memory.h"
#include "device/memory/pages.h"

namespace deeptide::sharding {
namespace {

using device::round_up;

constexpr int64_t kSmallUnit = 1 << 16;  // elements: neighbouring blocks below this size share a unit and a collective

int64_t alignment(at::ScalarType dtype) {
  return device::kAlignmentBytes / static_cast<int64_t>(c10::elementSize(dtype));
}

bool is_number(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

std::string parent_of(const std::string& path) {
  const auto dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

std::string last_of(const std::string& path) {
  const auto dot = path.rfind('.');
  return dot == std::string::npos ? path : path.substr(dot + 1);
}

bool inside(const std::string& path, const std::string& folder) {
  return path.size() > folder.size() && path.compare(0, folder.size(), folder) == 0 && path[folder.size()] == '.';
}

/// Returns the paths of modules that are blocks. A block is a child of a container whose numbered children repeat a
/// type with children of its own; it has the commonest type there and lies in no other block.
std::vector<std::string> find_blocks(const std::vector<ModuleSpec>& modules) {
  std::map<std::string, bool> has_children;
  for (const auto& module : modules) has_children[parent_of(module.path)] = true;
  std::map<std::pair<std::string, std::string>, std::vector<std::string>> families;
  for (const auto& module : modules) {
    if (!is_number(last_of(module.path)) || !has_children.count(module.path)) continue;
    families[{parent_of(module.path), module.type}].push_back(module.path);
  }
  std::vector<std::string> candidates;
  for (const auto& [key, members] : families) {
    if (members.size() >= 2) candidates.insert(candidates.end(), members.begin(), members.end());
  }
  std::sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
    return std::count(a.begin(), a.end(), '.') < std::count(b.begin(), b.end(), '.');
  });
  std::vector<std::string> blocks;
  for (const auto& candidate : candidates) {
    const bool nested = std::any_of(blocks.begin(), blocks.end(), [&](const auto& b) { return inside(candidate, b); });
    if (!nested) blocks.push_back(candidate);
  }
  return blocks;
}

/// A run of consecutive parameters that belong together before dtypes and limits split it.
struct Run {
  std::string block;  // empty: between blocks
  std::vector<int> parameters;
  int64_t numel = 0;
};

std::vector<Run> find_runs(const std::vector<ParameterSpec>& parameters, const std::vector<std::string>& blocks) {
  std::vector<Run> runs;
  for (int i = 0; i < static_cast<int>(parameters.size()); ++i) {
    std::string block;
    for (const auto& b : blocks) {
      if (inside(parameters[i].name, b)) block = b;
    }
    if (runs.empty() || runs.back().block != block) runs.push_back({block, {}, 0});
    runs.back().parameters.push_back(i);
    runs.back().numel += parameters[i].numel;
  }
  return runs;
}

/// Number of elements up to which parameters outside blocks, or very small blocks, share a unit.
int64_t grouping_limit(const std::vector<Run>& runs, int64_t total) {
  int64_t largest = 0;
  for (const auto& run : runs) {
    if (!run.block.empty()) largest = std::max(largest, run.numel);
  }
  return largest > 0 ? largest : std::max<int64_t>(total / 8, 1);
}

std::vector<Run> merge_small_blocks(std::vector<Run> runs, int64_t total) {
  std::vector<Run> merged;
  const int64_t small = std::min<int64_t>(kSmallUnit, std::max<int64_t>(total / 8, 1));
  for (auto& run : runs) {
    const bool join = !merged.empty() && !run.block.empty() && !merged.back().block.empty() &&
                      parent_of(run.block) == parent_of(merged.back().block.substr(0, merged.back().block.find(' '))) &&
                      merged.back().numel + run.numel <= small;
    if (join) {
      auto& last = merged.back();
      last.block = last.block.substr(0, last.block.find(' ')) + " … " + run.block;
      last.parameters.insert(last.parameters.end(), run.parameters.begin(), run.parameters.end());
      last.numel += run.numel;
    } else {
      merged.push_back(std::move(run));
    }
  }
  return merged;
}

class Packer {
 public:
  Packer(const std::vector<ParameterSpec>& parameters, const LayoutOptions& options)
      : parameters_(parameters), options_(options) {}

  /// Splits one run by (dtype, trainable, kind) and by `limit`, keeping the order.
  void pack(const Run& run, int64_t limit) {
    using Sort = std::tuple<at::ScalarType, bool, int>;
    std::map<Sort, UnitLayout> open;
    std::vector<Sort> order;
    for (int index : run.parameters) {
      const auto& spec = parameters_[index];
      const Sort key{spec.dtype, spec.trainable, spec.kind};
      auto found = open.find(key);
      if (found != open.end() && limit > 0 && found->second.used + spec.numel > limit) {
        close(std::move(found->second), run);
        open.erase(found);
        order.erase(std::find(order.begin(), order.end(), key));
        found = open.end();
      }
      if (found == open.end()) {
        found = open.emplace(key, UnitLayout{}).first;
        order.push_back(key);
        found->second.dtype = spec.dtype;
        found->second.trainable = spec.trainable;
      }
      append(found->second, index);
    }
    for (const auto& key : order) close(std::move(open[key]), run);
  }

  std::vector<UnitLayout> take() { return std::move(units_); }

 private:
  void append(UnitLayout& unit, int index) const {
    const auto& spec = parameters_[index];
    const int64_t offset = round_up(unit.numel, alignment(spec.dtype));
    unit.slots.push_back({index, offset, spec.numel});
    unit.numel = offset + spec.numel;
    unit.used += spec.numel;
  }

  void close(UnitLayout unit, const Run& run) {
    const int64_t align = alignment(unit.dtype);
    const auto kind = static_cast<size_t>(parameters_[unit.slots.front().parameter].kind);
    const int num_shards = kind < options_.by_kind.size() ? options_.by_kind[kind] : options_.num_shards;
    unit.shard = round_up((unit.numel + num_shards - 1) / num_shards, align);
    unit.shard = std::max(unit.shard, align);
    unit.numel = unit.shard * num_shards;
    unit.name = name_of(unit, run);
    units_.push_back(std::move(unit));
  }

  std::string name_of(const UnitLayout& unit, const Run& run) const {
    const auto& first = parameters_[unit.slots.front().parameter].name;
    const auto& last = parameters_[unit.slots.back().parameter].name;
    if (!run.block.empty() && unit.slots.size() == run.parameters.size()) return run.block;
    return unit.slots.size() == 1 ? first : first + " … " + last;
  }

  const std::vector<ParameterSpec>& parameters_;
  const LayoutOptions& options_;
  std::vector<UnitLayout> units_;
};

}  // namespace

int64_t shard_numel(const std::vector<const UnitLayout*>& units) {
  int64_t numel = 0;
  for (const UnitLayout* unit : units) numel += unit->shard;
  return numel;
}

std::vector<UnitLayout> build_layout(const std::vector<ParameterSpec>& parameters,
                                     const std::vector<ModuleSpec>& modules, const LayoutOptions& options) {
  int64_t total = 0;
  for (const auto& parameter : parameters) total += parameter.numel;
  auto runs = merge_small_blocks(find_runs(parameters, find_blocks(modules)), total);
  const int64_t grouping = grouping_limit(runs, total);
  Packer packer(parameters, options);
  for (const auto& run : runs) {
    int64_t limit = run.block.empty() ? grouping : 0;
    if (options.max_unit_numel > 0)
      limit = limit == 0 ? options.max_unit_numel : std::min(limit, options.max_unit_numel);
    packer.pack(run, limit);
  }
  return packer.take();
}

}  // namespace deeptide::sharding
