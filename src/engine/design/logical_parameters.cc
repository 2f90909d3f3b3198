// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds ties, groups and types.
#include "engine/design/logical_parameters.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/libraries/format.h"
#include "base/log.h"
#include "device/torch_versions.h"

namespace deeptide::engine {

using at::Tensor;
using sharding::Alias;
using sharding::Parameter;
using sharding::ParameterSpec;

namespace {

void check_tensor(const std::string& name, const Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), "parameter '", name, "' is undefined");
  TORCH_CHECK_VALUE(!tensor.is_meta(), "parameter '", name,
                    "' is on the meta device and has no values; give the "
                    "model memory and values first: model.to_empty(device=…), then initialise it");
  TORCH_CHECK_VALUE(!tensor.has_storage() || !sharding::is_bound(tensor.storage()), "parameter '", name,
                    "' already belongs to another engine; one model has one engine");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.has_storage(), "parameter '", name, "' is ",
                    tensor.layout(), "; only dense parameters are supported");
  // Autograd knows no other types: what is trained and not floating is complex.
  TORCH_CHECK_VALUE(c10::isFloatingType(tensor.scalar_type()) || stays_whole(tensor), "parameter '", name,
                    "' is trainable and of type ", tensor.scalar_type(),
                    "; optimizers here step real numbers. Let the parameter be torch.view_as_real(value), of shape [",
                    join_text(tensor.sizes(), ", "), ", 2], and let forward use torch.view_as_complex(parameter)");
}

/// Adds a name; `p.aliases` holds all names, the first included, until `choose_first`.
void add_name(Parameter& p, const std::string& name, const Tensor& tensor) {
  const auto same = [&](const Tensor& other) { return other.is_same(tensor); };
  const auto found = std::find_if(p.tensors.begin(), p.tensors.end(), same);
  p.aliases.push_back({name, static_cast<int>(found - p.tensors.begin())});
  if (found == p.tensors.end()) p.tensors.push_back(tensor);
}

/// Tied tensors may order the elements differently (`decoder.weight = Parameter(encoder.weight.t())`). The flat memory
/// has one order: that of a contiguous one, which becomes the first and gives the parameter its name.
void choose_first(Parameter& p) {
  const auto contiguous = [](const Tensor& t) { return t.is_contiguous(); };
  const auto found = std::find_if(p.tensors.begin(), p.tensors.end(), contiguous);
  const int first = found == p.tensors.end() ? 0 : static_cast<int>(found - p.tensors.begin());
  std::swap(p.tensors.front(), p.tensors[first]);
  for (Alias& alias : p.aliases) alias.tensor = alias.tensor == first ? 0 : alias.tensor == 0 ? first : alias.tensor;
  const auto named = std::find_if(p.aliases.begin(), p.aliases.end(), [](const Alias& a) { return a.tensor == 0; });
  p.name = named->name;
  p.aliases.erase(named);
  const Tensor& front = p.tensors.front();
  for (const Alias& alias : p.aliases) {
    const Tensor& other = p.tensors[alias.tensor];
    const bool equal = other.sizes() == front.sizes() && other.strides() == front.strides();
    TORCH_CHECK_VALUE(equal || (front.is_contiguous() && other.is_non_overlapping_and_dense()), "parameters '", p.name,
                      "' and '", alias.name, "' share memory but order its elements differently, and neither is ",
                      "contiguous; tie one of them to a contiguous tensor");
  }
}

std::string module_of(const std::string& name) {
  const auto dot = name.rfind('.');
  return dot == std::string::npos ? "" : name.substr(0, dot);
}

/// Finds the parameter that `tensor` is another name of, or null.
Parameter* find_same(std::vector<Parameter>& distinct, const std::vector<int>& of_storage, const std::string& name,
                     const Tensor& tensor) {
  Parameter* same = nullptr;
  for (int i : of_storage) {
    const Tensor& other = distinct[i].tensors.front();
    if (tensor.is_same(other)) return &distinct[i];
    if (tensor.numel() == 0 || other.numel() == 0) continue;  // no memory to share
    const int64_t begin = tensor.storage_offset(), other_begin = other.storage_offset();
    if (begin == other_begin && tensor.numel() == other.numel()) same = &distinct[i];
    const bool apart = begin + tensor.numel() <= other_begin || other_begin + other.numel() <= begin;
    TORCH_CHECK_VALUE(same || apart, "parameters '", distinct[i].aliases.front().name, "' and '", name,
                      "' overlap in memory without being the same; make one of them a clone");
  }
  return same;
}

}  // namespace

bool stays_whole(const Tensor& parameter) {
  return !parameter.requires_grad() && !c10::isFloatingType(parameter.scalar_type());
}

std::vector<Parameter> distinct_parameters(const std::vector<NamedTensor>& named) {
  std::vector<Parameter> distinct;
  std::map<const void*, std::vector<int>> by_storage;
  std::set<std::string> names;
  for (const auto& [name, tensor] : named) {
    check_tensor(name, tensor);
    TORCH_CHECK_VALUE(names.insert(name).second, "parameter name '", name, "' occurs twice in the model's description");
    if (stays_whole(tensor)) continue;
    auto& of_storage = by_storage[tensor.storage().unsafeGetStorageImpl()];
    Parameter* p = find_same(distinct, of_storage, name, tensor);
    if (p == nullptr) {
      of_storage.push_back(static_cast<int>(distinct.size()));
      p = &distinct.emplace_back();
      p->numel = tensor.numel();
      p->required_grad = false;
    }
    p->required_grad = p->required_grad || tensor.requires_grad();
    add_name(*p, name, tensor);
  }
  for (Parameter& p : distinct) choose_first(p);
  return distinct;
}

at::Device common_device(const std::vector<Parameter>& parameters) {
  if (parameters.empty()) return at::kCPU;
  const Parameter& first = parameters.front();
  for (const Parameter& p : parameters) {
    TORCH_CHECK_VALUE(p.tensors.front().device() == first.tensors.front().device(), "parameter '", p.name, "' is on ",
                      p.tensors.front().device(), " and '", first.name, "' on ", first.tensors.front().device(),
                      "; move the whole model to one device first");
  }
  return first.tensors.front().device();
}

void assign_groups(std::vector<Parameter>& parameters, const std::vector<ParameterGroup>& groups) {
  std::map<std::string, Parameter*> by_name;
  for (Parameter& p : parameters) {
    by_name[p.name] = &p;
    for (const Alias& alias : p.aliases) by_name[alias.name] = &p;
  }
  for (int g = 0; g < static_cast<int>(groups.size()); ++g) {
    for (const auto& name : groups[g].parameters) {
      const auto found = by_name.find(name);
      TORCH_CHECK_VALUE(found != by_name.end(), "optimizer group ", g, " names parameter '", name,
                        "', which the model does not have");
      Parameter& p = *found->second;
      TORCH_CHECK_VALUE(p.group < 0 || p.group == g, "parameter '", name, "' is in optimizer groups ", p.group, " and ",
                        g);
      p.group = g;
    }
  }
  for (Parameter& p : parameters) {
    if (!p.required_grad) p.group = -1;
    if (p.required_grad && groups.empty()) p.group = 0;
  }
}

KeepsFullPrecision::KeepsFullPrecision(const std::vector<ModuleInfo>& modules) {
  for (const ModuleInfo& module : modules) {
    // "SyncBatchNorm", "torch::nn::BatchNorm2dImpl", "InstanceNorm1d"
    const bool has_statistics =
        module.type.find("BatchNorm") != std::string::npos || module.type.find("InstanceNorm") != std::string::npos;
    if (has_statistics) paths_.push_back(module.path);
  }
  std::sort(paths_.begin(), paths_.end());
}

bool KeepsFullPrecision::tensor(const std::string& name) const {
  return std::binary_search(paths_.begin(), paths_.end(), module_of(name));
}

std::vector<ParameterSpec> specs_of(const std::vector<Parameter>& parameters, at::ScalarType compute,
                                    const KeepsFullPrecision& keeps) {
  std::vector<ParameterSpec> specs;
  for (const Parameter& p : parameters) {
    const auto own = p.tensors.front().scalar_type();
    const auto dtype = own == at::kFloat && !keeps.tensor(p.name) ? compute : own;
    specs.push_back({p.name, p.numel, dtype, p.required_grad && p.group >= 0, p.group});
  }
  return specs;
}

void check_trainable(const std::vector<ParameterSpec>& specs, at::ScalarType compute, const std::string& trained_by) {
  const bool any = std::any_of(specs.begin(), specs.end(), [](const auto& spec) { return spec.trainable; });
  TORCH_CHECK_VALUE(any || trained_by.empty(),
                    "the model has no trainable parameters (requires_grad is false on all of its ", specs.size(),
                    "), but ", trained_by, " configures an optimizer");
  for (const auto& spec : specs) {
    const bool supported = spec.dtype == at::kFloat || spec.dtype == at::kBFloat16 || spec.dtype == compute;
    TORCH_CHECK_VALUE(!spec.trainable || supported, "parameter '", spec.name, "' is trainable and of type ", spec.dtype,
                      "; trainable parameters are fp32 or bf16, and fp16 with loss scaling (\"fp16\": "
                      "{\"enabled\": true}): call .float() on it first");
  }
}

void warn_of_views(const std::vector<Parameter>& parameters) {
  std::map<const void*, size_t> known;
  for (const Parameter& p : parameters) known[p.tensors.front().storage().unsafeGetStorageImpl()] += p.tensors.size();
  std::string names;
  int count = 0;
  for (const Parameter& p : parameters) {
    const Tensor& t = p.tensors.front();
    // A storage that holds more than this parameter is a file's or a flat buffer's, which its maker may hold too.
    const bool own = t.storage().nbytes() == static_cast<size_t>(p.numel) * t.element_size();
    if (p.numel == 0 || !own || device::num_users(t.storage()) <= known[t.storage().unsafeGetStorageImpl()]) continue;
    if (++count <= 3) names += (names.empty() ? "'" : ", '") + p.name + "'";
  }
  if (count == 0) return;
  if (count > 3) names += " and " + std::to_string(count - 3) + " more";
  log(LogLevel::warning, "another tensor uses the memory of " + names +
                             " (a view, or a buffer made from it, before initialize): it keeps today's values and does "
                             "not follow the training. Make views in forward, from the parameter.");
}

}  // namespace deeptide::engine
