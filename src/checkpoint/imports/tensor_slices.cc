// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Matches names with patterns, and cuts ranges of slices into regions of whole tensors.
#include "checkpoint/imports/tensor_slices.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "checkpoint/imports/deepspeed_tensors.h"

namespace deeptide::checkpoint {

using Kind = PickleValue::Kind;

namespace {

constexpr size_t kMostCharacters = 1000;  // of a pattern or a name: matching may take their product's time

int64_t product(Shape::const_iterator begin, Shape::const_iterator end) {
  return std::accumulate(begin, end, int64_t{1}, std::multiplies<>());
}

}  // namespace

void TensorSlices::note(const std::string& name, int64_t slice, const Shape& shape) {
  shapes_[name].emplace(slice, shape);
}

void TensorSlices::refuse(const std::string& name, const std::string& why) const {
  throw CheckpointError("cannot join what " + std::to_string(count_) + " tensor-parallel ranks have of '" + name +
                        "' in DeepSpeed's checkpoint " + file_.path() + ": " + why +
                        "; convert it with DeepSpeed's ds_to_universal first");
}

bool TensorSlices::matches(const PickleValue& pattern, const std::string& name) const {
  if (!pattern.is(Kind::text)) return false;
  if (pattern.text.size() > kMostCharacters || name.size() > kMostCharacters) refuse(name, "a pattern is too long");
  try {
    auto known = patterns_.find(&pattern);
    if (known == patterns_.end()) known = patterns_.emplace(&pattern, Pattern(pattern.text)).first;
    return known->second.begins(name);  // as Python's re.match
  } catch (const PatternError&) {
    refuse(name, "the pattern '" + pattern.text.substr(0, 80) + "' cannot be read");
  }
}

bool TensorSlices::is_in(const char* list, const std::string& name) const {
  const PickleValue* patterns = info_->find(list);
  if (patterns == nullptr) return false;
  const auto fits = [&](const PickleValue* pattern) { return matches(*pattern, name); };
  return std::any_of(patterns->items.begin(), patterns->items.end(), fits) ||
         std::any_of(patterns->entries.begin(), patterns->entries.end(),
                     [&](const auto& each) { return fits(each.first); });
}

TensorSlices::Layout TensorSlices::cut_evenly(const std::string& name, int64_t slice, size_t dim, int64_t parts) const {
  const auto& shapes = shapes_.at(name);
  Layout layout{false, dim, shapes.at(slice), std::vector<Band>(static_cast<size_t>(parts))};
  int64_t size = 0, before = 0;
  for (const auto& [other, shape] : shapes) {
    if (shape.size() != layout.whole.size() || shape.size() <= dim || shape[dim] % parts != 0) {
      refuse(name, "a slice has shape " + shape_text(shape));
    }
    size += shape[dim];
    if (other < slice) before += shape[dim];
  }
  const int64_t each = layout.whole[dim] / parts;
  for (int64_t part = 0; part < parts; ++part) {
    layout.bands[static_cast<size_t>(part)] = {part * each, each, part * (size / parts) + before / parts};
  }
  layout.whole[dim] = size;
  return layout;
}

/// The widths of each sub-parameter on each rank: recorded, or even where the version before 0.4 counts them only.
std::vector<std::vector<int64_t>> TensorSlices::widths_of(const std::string& name, const PickleValue& spec,
                                                          size_t dim) const {
  std::vector<std::vector<int64_t>> widths;
  if (const PickleValue* recorded = info_->find("sub_param_shard_widths")) {
    for (const auto& [pattern, value] : recorded->entries) {
      if (!matches(*pattern, name)) continue;
      for (const PickleValue* part : value->items) {
        auto& each = widths.emplace_back();
        for (const PickleValue* width : part->items) each.push_back(integer_in(file_, *width));
      }
      return widths;
    }
  }
  const PickleValue& sizes = *member(file_, spec, "shape").items.at(dim);
  if (!sizes.items.empty()) {
    for (const PickleValue* size : sizes.items) {
      widths.emplace_back(static_cast<size_t>(count_), integer_in(file_, *size) / count_);
    }
    return widths;
  }
  int64_t all = 0;
  for (const auto& [slice, shape] : shapes_.at(name)) all += shape.at(dim);
  const int64_t parts = std::clamp<int64_t>(integer_in(file_, sizes), 1, 1 << 16);
  widths.assign(static_cast<size_t>(parts), std::vector<int64_t>(static_cast<size_t>(count_), all / parts / count_));
  return widths;
}

TensorSlices::Layout TensorSlices::cut_as_listed(const std::string& name, int64_t slice,
                                                 const PickleValue& spec) const {
  const auto dim = static_cast<size_t>(integer_in(file_, member(file_, spec, "partition_dim")));
  Layout layout = cut_evenly(name, slice, dim, 1);
  if (dim >= member(file_, spec, "shape").items.size()) refuse(name, "its sub-parameters have too few dimensions");
  const auto widths = widths_of(name, spec, dim);
  layout.bands.clear();
  int64_t here = 0, there = 0;
  for (const auto& each : widths) {
    if (static_cast<int64_t>(each.size()) != count_) refuse(name, "its sub-parameters are of another number of ranks");
    if (std::any_of(each.begin(), each.end(), [](int64_t width) { return width < 0; }))
      refuse(name, "a width is negative");
    const auto own = each.begin() + slice;
    layout.bands.push_back({here, *own, std::accumulate(each.begin(), own, there)});
    here += *own;
    there = std::accumulate(each.begin(), each.end(), there);
  }
  if (here != shapes_.at(name).at(slice)[dim] || there != layout.whole[dim]) {
    refuse(name, "its sub-parameters are not as large as its slices");
  }
  return layout;
}

/// A vocabulary may be filled up to a multiple of the ranks.
void TensorSlices::strip_padding(const std::string& name, Layout& layout) const {
  if (!is_in("vocabulary_parameter_patterns", name)) return;
  const int64_t rows = integer_in(file_, member(file_, *info_, "original_vocab_size"));
  if (layout.dim != 0 || rows < 0 || rows > layout.whole.at(0)) refuse(name, "it has no rows of a vocabulary");
  layout.whole[0] = rows;
  for (Band& band : layout.bands) band.size = std::clamp<int64_t>(rows - band.there, 0, band.size);
}

/// Newer checkpoints have the places of blocks as well, which also say what patterns cannot.
void TensorSlices::compare_with_map(const std::string& name, int64_t slice, const Layout& layout) const {
  const PickleValue* map = info_->find("affine_map");
  const PickleValue* parameters = map == nullptr ? nullptr : map->find("params");
  if (parameters == nullptr) return;
  for (const auto& [pattern, value] : parameters->entries) {
    if (!matches(*pattern, name)) continue;
    const PickleValue* found = nullptr;
    for (const auto& [rank, held] : member(file_, *value, "ranks").entries) {
      const bool own = rank->is(Kind::integer) ? rank->integer == slice : rank->text == std::to_string(slice);
      if (own) found = held;
    }
    const auto whole = shape_of(member(file_, *value, "logical_shape"));
    bool same = found != nullptr && whole == layout.whole;
    const auto& pieces = same ? member(file_, *found, "pieces").items : std::vector<const PickleValue*>();
    same = same && pieces.size() == (layout.is_replicated ? 1 : layout.bands.size());
    for (size_t i = 0; same && i < pieces.size(); ++i) {
      Shape shape = layout.whole;
      int64_t from = 0, to = 0;
      if (!layout.is_replicated) {
        const Band& band = layout.bands[i];
        const auto after = static_cast<Shape::difference_type>(layout.dim + 1);
        const int64_t inner = product(layout.whole.begin() + after, layout.whole.end());
        shape[layout.dim] = band.size;
        from = band.there * inner;
        to = band.here * inner;
      }
      same = pieces[i]->find("scale") == nullptr && shape_of(member(file_, *pieces[i], "shape")) == shape &&
             integer_in(file_, *member(file_, *pieces[i], "source").items.at(0)) == from &&
             integer_in(file_, *member(file_, *pieces[i], "dest").items.at(0)) == to;
    }
    if (!same) refuse(name, "its affine_map is not what is read here (scaled, or partly replicated)");
  }
}

const TensorSlices::Layout& TensorSlices::layout_of(const std::string& name, int64_t slice, const Shape& shape) const {
  const auto [found, fresh] = layouts_.try_emplace({name, slice});
  if (fresh) {
    found->second = make_layout(name, slice);
    if (!found->second.is_replicated) strip_padding(name, found->second);
    compare_with_map(name, slice, found->second);
  }
  if (shapes_.at(name).at(slice) != shape) refuse(name, "a slice has two shapes");
  return found->second;
}

TensorSlices::Layout TensorSlices::make_layout(const std::string& name, int64_t slice) const {
  if (info_ == nullptr) {
    refuse(name, "it has no universal_checkpoint_info that says how slices are joined");
  }
  if (is_in("autotp_unsupported_parameter_patterns", name)) refuse(name, "DeepSpeed marks it as not convertible");
  if (is_in("parameter_to_average_patterns", name)) refuse(name, "it is the average of the ranks' values");
  const auto& shapes = shapes_.at(name);
  const auto whole = [&] { return Layout{true, 0, shapes.at(slice), {}}; };
  if (is_in("tp_replicated_parameter_patterns", name)) return whole();
  if (static_cast<int64_t>(shapes.size()) != count_) refuse(name, "a rank lacks it");
  if (is_in("parameter_with_2_sub_params_cat_dim_0", name)) return cut_evenly(name, slice, 0, 2);
  if (const PickleValue* specs = info_->find("parameter_with_sub_params")) {
    for (const PickleValue* spec : specs->items) {
      const auto& patterns = member(file_, *spec, "patterns").items;
      const bool own = std::any_of(patterns.begin(), patterns.end(), [&](auto* each) { return matches(*each, name); });
      if (own) return cut_as_listed(name, slice, *spec);
    }
  }
  if (is_in("parameter_with_row_parallelism_patterns", name)) return cut_evenly(name, slice, 1, 1);
  if (buffers_.contains(name)) return whole();
  return cut_evenly(name, slice, 0, 1);
}

void TensorSlices::add(int64_t slice, const TensorId& id, const Shape& shape, const Region& region,
                       const ForeignElements& elements, ForeignTable& table) const {
  if (count_ == 1) return table.add(id, shape, region, elements);
  const Layout& layout = layout_of(id.name, slice, shape);
  if (layout.is_replicated) {
    if (slice == 0) table.add(id, shape, region, elements);
    return;
  }
  const auto after = static_cast<Shape::difference_type>(layout.dim + 1);
  const int64_t inner = product(shape.begin() + after, shape.end()), row = inner * shape[layout.dim];
  const int64_t first = region.offsets.at(0), last = first + region.sizes.at(0);
  const bool whole_rows = layout.bands.size() == 1 && layout.bands[0].size == shape[layout.dim];
  const auto add_range = [&](int64_t begin, int64_t end, const Band& band) {
    if (begin >= end) return;
    const auto part = [&](const Region& there, int64_t from) {
      table.add(id, layout.whole, there,
                {elements.file, elements.name, elements.tensor, elements.first + from - first});
    };
    const int64_t shift = band.there - band.here;
    if (layout.dim == 0) return part(Region::range(begin + shift * inner, end + shift * inner), begin);
    int64_t from = begin;
    for (Region box : boxes_of(shape, begin, end)) {
      const int64_t count = box.numel();
      box.offsets[layout.dim] += shift;
      part(box, from);
      from += count;
    }
  };
  if (row == 0) return;
  if (whole_rows) return add_range(first, last, layout.bands[0]);
  for (int64_t index = first / row; index * row < last; ++index) {
    for (const Band& band : layout.bands) {
      const int64_t begin = index * row + band.here * inner;
      add_range(std::max(first, begin), std::min(last, begin + band.size * inner), band);
    }
  }
}

void TensorSlices::add_whole(int64_t slice, const TensorId& id, const ForeignElements& elements,
                             ForeignTable& table) const {
  if (count_ == 1) return table.add_whole(id, elements.name, elements.tensor);
  add(slice, id, elements.tensor.shape, Region::range(0, elements.tensor.numel()), elements, table);
}

}  // namespace deeptide::checkpoint
