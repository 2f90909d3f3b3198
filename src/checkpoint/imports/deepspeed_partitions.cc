// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The shards of ZeRO: which elements of which parameter each rank's flat tensors hold.
#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "checkpoint/format/json_field.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/imports/deepspeed_tensors.h"

namespace deeptide::checkpoint {

using Kind = PickleValue::Kind;

namespace {

/// A flat master of one rank, and the states of the same elements.
struct Flat {
  TorchTensor master;
  const PickleValue* states = nullptr;  // by name; null: none
  int64_t numel = 0;
  int64_t padding = 0;  // that the master may lack and the states have
};

/// A part of a parameter, and where its first element lies in a rank's flats, one after the other.
struct Part {
  std::string name;
  Shape shape;
  Region region;
  int64_t first = 0;
};

struct RankFile {
  const TorchFile& file;
  std::string name;
  int64_t slice;               // of the tensors, that it has parts of
  const TensorSlices& slices;  // how these are joined
};

const PickleValue& item(const TorchFile& file, const PickleValue& list, size_t index, const char* what) {
  if (index >= list.items.size()) {
    malformed(file.path(), std::string("its ") + what + " has " + std::to_string(list.items.size()) +
                               " entries, one more was expected");
  }
  return *list.items[index];
}

TorchTensor tensor_in(const TorchFile& file, const PickleValue& value, const char* what) {
  auto tensor = file.tensor(value);
  if (!tensor) malformed(file.path(), std::string("its ") + what + " has something that is no tensor (in files?)");
  return *std::move(tensor);
}

/// The states of the flat tensor that is number `index` of the base optimizer.
const PickleValue* states_of(const PickleValue* base, int64_t index) {
  const PickleValue* by_number = base == nullptr ? nullptr : base->find("state");
  if (by_number == nullptr) return nullptr;
  for (const auto& [key, states] : by_number->entries) {
    if (key->is(Kind::integer) && key->integer == index) return states;
  }
  return nullptr;
}

/// The numbers of the flat tensors of each parameter group.
std::vector<std::vector<int64_t>> numbers_by_group(const TorchFile& file, const PickleValue* base) {
  std::vector<std::vector<int64_t>> groups;
  const PickleValue* listed = base == nullptr ? nullptr : base->find("param_groups");
  if (listed == nullptr) return groups;
  for (const PickleValue* group : listed->items) {
    auto& numbers = groups.emplace_back();
    for (const PickleValue* number : member(file, *group, "params").items) {
      numbers.push_back(integer_in(file, *number));
    }
  }
  return groups;
}

void add_part(const RankFile& rank, const Flat& flat, const Part& part, int64_t first, ForeignTable& table) {
  const auto add = [&](const Role& role, const TorchTensor& tensor) {
    const ForeignElements elements{rank.file, rank.name, tensor, first};
    rank.slices.add(rank.slice, {part.name, role}, part.shape, part.region, elements, table);
  };
  add(Role::master(), flat.master);
  if (flat.states == nullptr) return;
  for (const auto& [key, value] : flat.states->entries) {
    if (!key->is(Kind::text)) continue;
    const auto tensor = rank.file.tensor(*value);
    const int64_t numel = tensor ? tensor->numel() : 0;
    if (tensor && tensor->shape.empty()) table.add_value(part.name, key->text, rank.name, *tensor);
    if (key->text == "step") {
      if (const auto steps = rank.file.number(*value)) table.count_steps(part.name, *steps);
    } else if (tensor && !tensor->shape.empty() && numel >= flat.numel && numel <= flat.numel + flat.padding) {
      if (const auto role = table.role_of(key->text)) add(*role, *tensor);
    }
  }
}

/// Adds a part that may lie in several flats.
void place(const RankFile& rank, const std::vector<Flat>& flats, const Part& part, ForeignTable& table) {
  int64_t begin = 0, placed = 0;
  const int64_t count = part.region.numel();
  for (const Flat& flat : flats) {
    const int64_t from = std::max(part.first + placed, begin), end = begin + flat.numel;
    if (placed < count && from < end) {
      const int64_t here = std::min(count - placed, end - from);
      Part share = part;
      share.region = Region::range(part.region.offsets[0] + placed, part.region.offsets[0] + placed + here);
      add_part(rank, flat, share, from - begin, table);
      placed += here;
    }
    begin = end;
  }
  if (placed < count) malformed(rank.file.path(), "its flat tensors end within '" + part.name + "'");
}

/// Elements of lower ranks of a part, and those of an earlier stage of the pipeline that this one is tied to.
struct Before {
  std::vector<int64_t> flats;              // elements of each group's flat tensor
  std::map<std::string, int64_t> reached;  // of each parameter
  const std::set<std::string>& tied;
};

/// The parts of a group that a rank's range holds. The flat tensor of a group is made of its parameters in the order of
/// `shapes`, with gaps where DeepSpeed aligns each; ranks have consecutive ranges of it.
void read_flat_range(const RankFile& rank, const std::vector<std::pair<std::string, Shape>>& shapes,
                     const PickleValue* gaps, const Flat& flat, int64_t start, Before& before, ForeignTable& table) {
  int64_t next = 0;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto& [name, shape] = shapes[i];
    const int64_t numel = numel_of(shape, rank.file.path()), at = next;
    next += numel;
    if (gaps != nullptr) next += integer_in(rank.file, item(rank.file, *gaps, i, "param_alignment_paddings"));
    if (before.tied.contains(name)) continue;
    before.reached.try_emplace(name, 0);
    const int64_t from = std::max(at, start), to = std::min(at + numel, start + flat.numel);
    if (from < to) place(rank, {flat}, {name, shape, Region::range(from - at, to - at), from - start}, table);
  }
}

/// Elements that a rank has of each parameter, as its file says; for a checkpoint without the parameters' order.
void read_listed_ranges(const RankFile& rank, const std::map<std::string, Shape>& shapes, const PickleValue& slices,
                        const Flat& flat, Before& before, ForeignTable& table) {
  const TorchFile& file = rank.file;
  for (const auto& [name, slice] : slices.entries) {
    if (before.tied.contains(name->text)) continue;
    const auto shape = shapes.find(name->text);
    if (shape == shapes.end() || slice->state == nullptr) {
      malformed(file.path(), "its slice of '" + name->text.substr(0, 80) + "' is of no parameter");
    }
    const int64_t count = integer_in(file, member(file, *slice->state, "numel"));
    const int64_t first = integer_in(file, member(file, *slice->state, "start"));
    int64_t& begin = before.reached[name->text];
    if (count < 0 || begin > numel_of(shape->second, file.path()) - count) {
      malformed(file.path(), "its slice of '" + name->text + "' is beyond the parameter");
    }
    place(rank, {flat}, {name->text, shape->second, Region::range(begin, begin + count), first}, table);
    begin += count;
  }
}

/// Stages 1 and 2. The order of parameters is that of `model`'s param_shapes: param_slice_mappings are of another one
/// where gradients are dealt out round-robin.
void read_ranges(const RankFile& rank, const TorchFile& model, const std::map<std::string, Shape>& shapes,
                 const PickleValue& states, Before& before, ForeignTable& table) {
  const TorchFile& file = rank.file;
  const PickleValue& masters = member(file, states, "single_partition_of_fp32_groups");
  const PickleValue& paddings = member(file, states, "group_paddings");
  const PickleValue* ordered = model.root().find("param_shapes");
  const PickleValue* gaps = states.find("param_alignment_paddings");
  const PickleValue* base = base_optimizer(states);
  const auto numbers = numbers_by_group(file, base);
  const PickleValue* lean = states.find("base_optimizer_state");  // of an elastic checkpoint: states by group
  for (size_t g = 0; g < masters.items.size(); ++g) {
    Flat flat{tensor_in(file, *masters.items[g], "single_partition_of_fp32_groups"), nullptr, 0, 0};
    flat.numel = flat.master.numel();
    flat.padding = integer_in(file, item(file, paddings, g, "group_paddings"));
    if (base != nullptr && g < numbers.size() && numbers[g].size() == 1) flat.states = states_of(base, numbers[g][0]);
    if (base == nullptr && lean != nullptr && g < lean->items.size()) flat.states = lean->items[g];
    if (ordered == nullptr) {
      const PickleValue& slices = member(file, states, "param_slice_mappings");
      read_listed_ranges(rank, shapes, item(file, slices, g, "param_slice_mappings"), flat, before, table);
      continue;
    }
    if (before.flats.size() <= g) before.flats.resize(g + 1);
    const PickleValue* own_gaps = gaps == nullptr ? nullptr : &item(file, *gaps, g, "param_alignment_paddings");
    read_flat_range(rank, shapes_of_group(model, item(model, *ordered, g, "param_shapes")), own_gaps, flat,
                    before.flats[g], before, table);
    before.flats[g] += flat.numel;
  }
}

/// Stage 3.
void read_slices(const RankFile& rank, int64_t number, int64_t world, const TorchFile& model, const PickleValue& states,
                 ForeignTable& table) {
  const TorchFile& file = rank.file;
  const PickleValue* base = base_optimizer(states);
  std::vector<int64_t> numbers;
  for (const auto& group : numbers_by_group(file, base)) numbers.insert(numbers.end(), group.begin(), group.end());
  std::vector<Flat> flats;
  for (const PickleValue* value : member(file, states, "fp32_flat_groups").items) {
    Flat flat{tensor_in(file, *value, "fp32_flat_groups"), nullptr, 0, 0};
    flat.numel = flat.master.numel();
    if (flats.size() < numbers.size()) flat.states = states_of(base, numbers[flats.size()]);
    flats.push_back(flat);
  }
  int64_t first = 0;
  for (const PickleValue* group : member(model, model.root(), "param_shapes").items) {
    for (const auto& [name, shape] : shapes_of_group(model, *group)) {
      const int64_t numel = numel_of(shape, model.path());
      const int64_t share = (numel + world - 1) / world;
      const int64_t begin = std::min(number * share, numel), end = std::min(begin + share, numel);
      place(rank, flats, {name, shape, Region::range(begin, end), first}, table);
      first += share;
    }
  }
}

/// The files of some ranks may be missing: the first rank says how many there are, of each group or of all.
void check_count(const std::string& path, size_t held, const TorchFile& file, const PickleValue& states) {
  const PickleValue* count = states.find("partition_count");
  if (count != nullptr && count->is(Kind::list) && !count->items.empty()) count = count->items.front();
  const auto ranks = static_cast<int64_t>(held);
  if (count == nullptr || integer_in(file, *count) == ranks) return;
  throw CheckpointError("DeepSpeed's checkpoint " + path + " is of " + std::to_string(integer_in(file, *count)) +
                        " data-parallel ranks and has the files of " + std::to_string(ranks) +
                        "; copy all ranks' files into it");
}

void read_part(const DeepspeedModel& model, int64_t stage, int64_t slice, std::set<std::string>& earlier,
               ForeignTable& table) {
  Before before{{}, {}, earlier};
  const auto shapes = model.shapes(stage, slice);
  const auto& optimizers = model.part(stage, slice).optimizers;
  const auto world = static_cast<int64_t>(optimizers.size());
  for (int64_t number = 0; number < world; ++number) {
    const std::string& name = optimizers[static_cast<size_t>(number)];
    const TorchFile file(model.folder().file(name));
    const RankFile rank{file, name, slice, model.slices()};
    const PickleValue& states = member(file, file.root(), "optimizer_state_dict");
    check_count(model.folder().path, optimizers.size(), file, states);
    if (states.find("fp32_flat_groups") != nullptr) {
      read_slices(rank, number, world, model.file(stage, slice), states, table);
    } else {
      read_ranges(rank, model.file(stage, slice), shapes, states, before, table);
    }
  }
  for (const auto& [name, count] : before.reached) earlier.insert(name);
}

}  // namespace

void read_zero_partitions(const DeepspeedModel& model, ForeignTable& table) {
  for (int64_t slice = 0; slice < model.num_slices(); ++slice) {
    std::set<std::string> earlier;
    for (int64_t stage = 0; stage < model.num_stages(); ++stage) {
      read_part(model, stage, slice, earlier, table);
    }
  }
}

}  // namespace deeptide::checkpoint
