// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Casts the buffers that are to have another type.
#include "engine/bind/buffer_types.h"

#include <algorithm>
#include <set>

#include "engine/design/choices.h"
#include "engine/design/logical_parameters.h"

namespace deeptide::engine {

using at::Tensor;

namespace {

std::vector<Fp32Pattern> patterns_of(const ModelDescription& model, at::ScalarType compute, const BufferTypes& types) {
  std::vector<Fp32Pattern> patterns;
  if (types.in_fp32) {
    for (const std::string& pattern : *types.in_fp32) patterns.push_back({"", pattern});
    return patterns;
  }
  for (const Fp32Pattern& pattern : model.in_fp32) {
    if (!pattern.fp16_only || compute == at::kHalf) patterns.push_back(pattern);
  }
  return patterns;
}

}  // namespace

BufferTypes buffer_types_of(const PrecisionConfig& precision) {
  BufferTypes types{.in_fp32 = precision.keep_in_fp32};
  if (precision.buffer_dtype) types.asked = scalar_type(*precision.buffer_dtype);
  return types;
}

bool occurs_in(const Fp32Pattern& pattern, const std::string& name) {
  size_t at = 0;
  if (!pattern.module.empty()) {
    if (!name.starts_with(pattern.module + ".")) return false;
    at = pattern.module.size() + 1;
  }
  for (size_t begin = 0; begin <= pattern.pattern.size();) {
    const size_t end = std::min(pattern.pattern.find('*', begin), pattern.pattern.size());
    const size_t found = name.find(pattern.pattern.substr(begin, end - begin), at);
    if (found == std::string::npos) return false;
    at = found + end - begin;
    begin = end + 1;
  }
  return true;
}

BufferCounts cast_buffers(const ModelDescription& model, at::ScalarType compute, const BufferTypes& types,
                          const KeepsFullPrecision& keeps) {
  BufferCounts counts;
  if (compute == at::kFloat) return counts;
  const auto patterns = patterns_of(model, compute, types);
  std::vector<NamedTensor> buffers = model.buffers;
  buffers.insert(buffers.end(), model.transient_buffers.begin(), model.transient_buffers.end());
  std::set<const c10::TensorImpl*> named;  // by any of its names
  for (const NamedTensor& buffer : buffers) {
    const bool is_named = std::any_of(patterns.begin(), patterns.end(),
                                      [&](const Fp32Pattern& pattern) { return occurs_in(pattern, buffer.name); });
    if (is_named) named.insert(buffer.tensor.unsafeGetTensorImpl());
  }
  for (NamedTensor& buffer : buffers) {
    Tensor& tensor = buffer.tensor;
    if (!c10::isFloatingType(tensor.scalar_type()) || keeps.tensor(buffer.name)) continue;
    const bool stays = named.contains(tensor.unsafeGetTensorImpl());
    const auto wanted = stays ? at::kFloat : types.asked.value_or(tensor.scalar_type());
    if (tensor.scalar_type() != wanted) {
      tensor.set_data(tensor.detach().to(wanted));
      ++counts.cast;
    }
    if (wanted == at::kFloat) counts.in_fp32.push_back(buffer.name);
  }
  return counts;
}

}  // namespace deeptide::engine
