// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Turns places in torch's files into extents of logical tensors.
#include "checkpoint/imports/foreign_table.h"

#include <algorithm>

#include "checkpoint/format/json_field.h"
#include "checkpoint/format/safetensors.h"
#include "optim/rules/rule.h"

namespace deeptide::checkpoint {
namespace {

/// DeepSpeed's kernels on a CPU keep Adagrad's sum under the name of Adam's second moment; SGD's momentum has torch's
/// name.
std::string own_name(const OptimizerInfo& optimizer, const std::string& state) {
  if (optimizer.name == "SGD" && state == "momentum_buffer") return "momentum";
  return optimizer.name == "Adagrad" && state == "exp_avg_sq" ? "sum" : state;
}

}  // namespace

void add_foreign(Table& table, const TensorId& id, const std::string& file, const TorchTensor& tensor) {
  Logical logical{id, tensor.shape, tensor.dtype, tensor_key(id), {}};
  const int64_t numel = tensor.numel();
  if (numel > 0) {
    const Shape strides = tensor.is_contiguous() ? Shape() : tensor.strides;
    logical.extents.push_back({Region::range(0, numel), file, tensor.offset, {}, strides});
  }
  table.insert_or_assign(id, std::move(logical));
}

void ForeignTable::add(const TensorId& id, const Shape& shape, const Region& region, const ForeignElements& elements) {
  const TorchTensor& source = elements.tensor;
  const int64_t count = region.numel();
  numel_of(shape, elements.file.path());
  if (count == 0) return;
  if (!fits(region, shape) || !source.is_contiguous() || elements.first < 0 ||
      elements.first > source.numel() - count) {
    malformed(elements.file.path(),
              "it lacks elements " + region.text() + " of '" + tensor_key(id) + "' of shape " + shape_text(shape));
  }
  Logical& logical = table_.try_emplace(id, Logical{id, shape, source.dtype, tensor_key(id), {}}).first->second;
  if (logical.shape != shape || logical.dtype != source.dtype) {
    malformed(elements.file.path(), "'" + logical.key + "' has another shape or type in it than in other files");
  }
  const auto width = static_cast<int64_t>(c10::elementSize(source.dtype));
  logical.extents.push_back({region, elements.name, source.offset + elements.first * width});
}

std::optional<Role> ForeignTable::role_of(const std::string& state) const {
  if (optimizer_ == nullptr) return Role::moment(state);
  const std::string name = own_name(*optimizer_, state);
  const auto& roles = optim::find_rule(optimizer_->name).roles();
  const bool kept = std::any_of(roles.begin(), roles.end(), [&](const auto& role) { return role.name == name; });
  return kept ? std::optional(Role::moment(name)) : std::nullopt;
}

void ForeignTable::add_value(const std::string& parameter, const std::string& state, const std::string& file,
                             const TorchTensor& tensor) {
  if (optimizer_ == nullptr) add_whole({parameter, Role::moment(state + kWholeState)}, file, tensor);
}

void ForeignTable::count_steps(const std::string& parameter, double steps) {
  int64_t& count = steps_[parameter];
  count = std::max(count, static_cast<int64_t>(steps));
}

bool ForeignTable::has(const std::string& name) const {
  return table_.contains({name, Role::master()}) || table_.contains({name, Role::param()}) ||
         table_.contains({name, Role::buffer()});
}

Table ForeignTable::finish(const std::string& folder) {
  check_extents(table_, folder);
  for (const auto& [id, logical] : table_) {
    int64_t held = 0;
    for (const Extent& extent : logical.extents) held += extent.region.numel();
    if (held != numel_of(logical.shape, folder)) {
      throw CheckpointError("the checkpoint " + folder + " has " + std::to_string(held) + " elements of '" +
                            tensor_key(id) + "' of shape " + shape_text(logical.shape) +
                            "; files are missing or of another save");
    }
  }
  return std::move(table_);
}

}  // namespace deeptide::checkpoint
