// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which regions of which logical tensors lie where: the table of one rank, and of a whole checkpoint.
#include "checkpoint/format/piece_table.h"

#include <algorithm>
#include <utility>

#include "checkpoint/format/safetensors.h"
#include "deeptide/errors.h"

namespace deeptide::checkpoint {
namespace {

// The beginning and the end of an extent in the flattened tensor.
struct Span {
  int64_t begin;
  int64_t end;
  const Extent* extent;
};

std::vector<Span> spans_of(const Logical& logical) {
  std::vector<Span> spans;
  for (const Extent& extent : logical.extents) {
    const Runs runs(logical.shape, extent.region);
    spans.push_back({runs.count() == 0 ? 0 : runs.begin(0), runs.end(), &extent});
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  return spans;
}

void check_apart(const Logical& logical, const Region& a, const Region& b, const std::string& where) {
  const int64_t shared = first_shared(logical.shape, a, b);
  if (shared < 0) return;
  throw CheckpointError(where + ": element " + std::to_string(shared) + " of '" + tensor_key(logical.id) +
                        "' is in two pieces, " + a.text() + " and " + b.text() + "; one rank alone must own it");
}

}  // namespace

std::string tensor_key(const TensorId& id) { return id.name + "/" + id.role.text(); }

std::string region_key(const std::string& key, const Region& region) {
  std::string text = key;
  for (size_t d = 0; d < region.offsets.size(); ++d) text += (d ? "," : "@") + std::to_string(region.offsets[d]);
  return text;
}

std::string shape_text(const Shape& shape) {
  std::string text = "(";
  for (size_t d = 0; d < shape.size(); ++d) text += (d ? ", " : "") + std::to_string(shape[d]);
  return text + ")";
}

Logical& declare(Table& table, const TensorId& id, const Shape& shape, at::ScalarType dtype) {
  const auto [found, added] = table.try_emplace(id, Logical{id, shape, dtype, tensor_key(id), {}});
  Logical& logical = found->second;
  if (logical.shape != shape || logical.dtype != dtype) {
    throw CheckpointError("cannot save '" + logical.key + "': its pieces disagree, got shape " + shape_text(shape) +
                          " " + dtype_name(dtype) + " after " + shape_text(logical.shape) + " " +
                          dtype_name(logical.dtype) + "; every rank must describe the same logical tensor");
  }
  return logical;
}

void check_extents(Table& table, const std::string& where) {
  for (auto& [id, logical] : table) {
    numel_of(logical.shape, where);
    for (const Extent& extent : logical.extents) {
      if (fits(extent.region, logical.shape)) continue;
      throw CheckpointError(where + ": the piece " + extent.region.text() + " of '" + tensor_key(id) +
                            "' is beyond shape " + shape_text(logical.shape));
    }
    const std::vector<Span> spans = spans_of(logical);
    for (size_t i = 0; i < spans.size(); ++i) {
      for (size_t j = i + 1; j < spans.size() && spans[j].begin < spans[i].end; ++j) {
        check_apart(logical, spans[i].extent->region, spans[j].extent->region, where);
      }
    }
    std::vector<Extent> sorted;
    for (const Span& span : spans) sorted.push_back(*span.extent);
    logical.extents = std::move(sorted);
  }
}

}  // namespace deeptide::checkpoint
