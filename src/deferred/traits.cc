// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads schemas.
#include "deferred/traits.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>

namespace deeptide::deferred {

namespace {

/// Finds the argument that a result is another name of, by the letter that the schema gives both.
int argument_returned(const c10::FunctionSchema& schema, const c10::Argument& result) {
  const auto* alias = result.alias_info();
  if (alias == nullptr) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) return static_cast<int>(i);
  }
  return -1;
}

Traits read_traits(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  Traits traits;
  bool aliases = false;
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i].name();
    if (name == "device") traits.device = static_cast<int>(i);
    if (name == "dtype") traits.dtype = static_cast<int>(i);
    if (name == "generator") traits.generator = static_cast<int>(i);
    const auto* alias = arguments[i].alias_info();
    if (alias == nullptr || i >= 64) continue;
    if (alias->isWrite()) traits.writes |= uint64_t{1} << i;
    aliases = true;
  }
  for (const auto& result : schema.returns()) traits.returns_argument.push_back(argument_returned(schema, result));
  traits.views_only = aliases && traits.writes == 0;
  traits.collective = schema.name().find("c10d") < schema.name().find("::");
  traits.composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  traits.changes_shape = op.hasTag(at::Tag::inplace_view);
  traits.sets_memory = schema.name() == "aten::set_" && schema.overload_name() == "source_Tensor";
  traits.random = op.hasTag(at::Tag::nondeterministic_seeded);
  traits.overwrites = is_one_of(
      schema.name(), {"aten::zero_", "aten::fill_", "aten::copy_", "aten::uniform_", "aten::normal_",
                      "aten::exponential_", "aten::random_", "aten::log_normal_", "aten::cauchy_", "aten::geometric_"});
  traits.makes_tensors = !schema.returns().empty() && traits.writes == 0;
  for (const auto& result : schema.returns()) {
    const auto& type = *result.type();
    const bool list = type.kind() == c10::TypeKind::ListType &&
                      type.castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
    traits.makes_tensors = traits.makes_tensors && (type.kind() == c10::TypeKind::TensorType || list);
  }
  traits.reads_shape = schema.name().ends_with("_like") || schema.name().starts_with("aten::new_");
  traits.copies = is_one_of(schema.name(), {"aten::clone", "aten::_to_copy"});
  return traits;
}

}  // namespace

const Traits& traits_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const void*, Traits> known;
  const void* schema = &op.schema();
  auto it = known.find(schema);
  if (it == known.end()) it = known.emplace(schema, read_traits(op)).first;
  return it->second;
}

}  // namespace deeptide::deferred
