// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gives the tensors of model files and of a pipeline's layers their names.
#include "checkpoint/imports/deepspeed_model.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "checkpoint/format/json_field.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/imports/deepspeed_tensors.h"

namespace deeptide::checkpoint {

using Kind = PickleValue::Kind;

namespace {

constexpr const char* kTied = "tied_modules.";

std::set<std::string> texts_of(const PickleValue* list) {
  std::set<std::string> texts;
  if (list == nullptr) return texts;
  for (const PickleValue* text : list->items) texts.insert(text->text);
  for (const auto& [key, value] : list->entries) texts.insert(key->text);
  return texts;
}

int64_t degree(const TorchFile& model, const char* key) {
  const PickleValue* degrees = model.root().find("checkpoint_parallel_dimensions");
  const PickleValue* found = degrees == nullptr ? nullptr : degrees->find(key);
  return found == nullptr ? 0 : std::max<int64_t>(integer_in(model, *found), 0);
}

/// Adds what is not under another name, or of another stage, before.
class Collector {
 public:
  Collector(const std::set<std::string>& buffers, std::vector<ModuleTensor>& tensors)
      : buffers_(buffers), tensors_(tensors) {}

  void add(const TorchFile& file, const std::string& file_name, const std::string& name, const PickleValue& value) {
    const auto tensor = file.tensor(value);
    if (!tensor) return;
    const bool shared =
        tensor->numel() > 0 && !places_.insert({file_name, tensor->offset, tensor->shape, tensor->strides}).second;
    if (shared || !names_.insert(name).second) return;
    tensors_.push_back({name, *tensor, buffers_.contains(name), &file, file_name});
  }

 private:
  const std::set<std::string>& buffers_;
  std::vector<ModuleTensor>& tensors_;
  std::set<std::tuple<std::string, int64_t, Shape, Shape>> places_;
  std::set<std::string> names_;
};

using Sizes = std::map<std::string, int64_t>;

/// Whether all tensors of a layer are named under `prefix`, by their sizes or as buffers.
bool fits_names(const TorchFile& layer, const std::string& prefix, const Sizes& trained,
                const std::set<std::string>& buffers) {
  for (const auto& [name, value] : layer.root().entries) {
    const auto tensor = layer.tensor(*value);
    if (!tensor) continue;
    const auto found = trained.find(prefix + name->text);
    if (buffers.contains(prefix + name->text)) continue;
    if (found == trained.end() || found->second != tensor->numel()) return false;
  }
  return !layer.root().entries.empty();
}

/// A layer's file has the names within the layer: a tied one is named by its key, which stands with what is trained.
std::string prefix_of(const TorchFile& layer, int64_t number, const Sizes& trained,
                      const std::set<std::string>& buffers) {
  std::string own = std::to_string(number) + ".";
  const auto known = trained.lower_bound(own);
  if (known != trained.end() && known->first.starts_with(own)) return own;
  for (auto at = trained.lower_bound(kTied); at != trained.end() && at->first.starts_with(kTied); ++at) {
    const std::string key = at->first.substr(0, at->first.find('.', std::string(kTied).size()) + 1);
    if (fits_names(layer, key, trained, buffers)) return key;
  }
  return own;
}

}  // namespace

std::vector<std::pair<std::string, Shape>> shapes_of_group(const TorchFile& model, const PickleValue& group) {
  std::vector<std::pair<std::string, Shape>> shapes;
  for (const auto& [name, value] : group.entries) {
    const auto shape = shape_of(*value);
    if (!name->is(Kind::text) || !shape) malformed(model.path(), "its param_shapes are none");
    numel_of(*shape, model.path());
    shapes.emplace_back(name->text, *shape);
  }
  return shapes;
}

DeepspeedModel::DeepspeedModel(const std::string& path) : folder_(list_deepspeed_folder(path)) {
  for (const DeepspeedPart& part : folder_.parts) {
    files_.push_back(std::make_unique<const TorchFile>(folder_.file(part.models.front())));
  }
  count_parts();
  modules_.resize(static_cast<size_t>(num_slices_));
  for (int64_t slice = 0; slice < num_slices_; ++slice) read_module(slice);
  const PickleValue* info = first().root().find("universal_checkpoint_info");
  slices_ = std::make_unique<TensorSlices>(first(), info, num_slices_);
  note_shapes();
}

void DeepspeedModel::count_parts() {
  const auto parts = static_cast<int64_t>(folder_.parts.size());
  const int64_t stages = degree(first(), "pp_degree");
  num_slices_ = degree(first(), "tp_degree");
  if (num_slices_ == 0) {
    num_slices_ = folder_.layers.empty() ? parts : static_cast<int64_t>(folder_.layers.begin()->second.size());
  }
  num_stages_ = parts / num_slices_;
  const bool lacks_layer = std::any_of(folder_.layers.begin(), folder_.layers.end(), [&](const auto& layer) {
    return static_cast<int64_t>(layer.second.size()) != num_slices_;
  });
  if (num_stages_ * num_slices_ != parts || (stages > 0 && stages != num_stages_) || lacks_layer) {
    throw CheckpointError("DeepSpeed's checkpoint " + folder_.path + " is of " +
                          std::to_string(std::max(stages, num_stages_)) + " pipeline stages and " +
                          std::to_string(num_slices_) + " tensor-parallel ranks, and lacks files of some; it has " +
                          std::to_string(parts) + " mp_rank files: copy all ranks' files into it");
  }
}

/// The sizes of what the parts of a slice train, by name: the shapes' list has them, or the optimizers' files.
Sizes DeepspeedModel::trained_sizes(int64_t slice) const {
  Sizes sizes;
  for (int64_t stage = 0; stage < num_stages_; ++stage) {
    if (const PickleValue* groups = file(stage, slice).root().find("param_shapes")) {
      for (const PickleValue* group : groups->items) {
        for (const auto& [name, shape] : shapes_of_group(file(stage, slice), *group)) {
          sizes[name] = numel_of(shape, folder_.path);
        }
      }
      continue;
    }
    Sizes held;
    for (const std::string& name : part(stage, slice).optimizers) {
      const TorchFile optimizer(folder_.file(name));
      const PickleValue* states = optimizer.root().find("optimizer_state_dict");
      const PickleValue* groups = states == nullptr ? nullptr : states->find("param_slice_mappings");
      if (groups == nullptr) continue;
      for (const PickleValue* group : groups->items) {
        for (const auto& [parameter, fragment] : group->entries) {
          const PickleValue* numel = fragment->state == nullptr ? nullptr : fragment->state->find("numel");
          if (numel != nullptr) held[parameter->text] += integer_in(optimizer, *numel);
        }
      }
    }
    sizes.merge(held);
  }
  return sizes;
}

void DeepspeedModel::read_module(int64_t slice) {
  std::set<std::string> buffers, aliases;
  for (int64_t stage = 0; stage < num_stages_; ++stage) {
    buffers.merge(texts_of(file(stage, slice).root().find("buffer_names")));
    aliases.merge(texts_of(file(stage, slice).root().find("shared_params")));
  }
  Collector collector(buffers, modules_[static_cast<size_t>(slice)]);
  const Sizes trained = folder_.layers.empty() ? Sizes() : trained_sizes(slice);
  for (const auto& [number, files] : folder_.layers) {
    const std::string& name = files[static_cast<size_t>(slice)];
    layers_.push_back(std::make_unique<const TorchFile>(folder_.file(name)));
    const TorchFile& layer = *layers_.back();
    const std::string prefix = prefix_of(layer, number, trained, buffers);
    for (const auto& [key, value] : layer.root().entries) {
      if (key->is(Kind::text)) collector.add(layer, name, prefix + key->text, *value);
    }
  }
  for (int64_t stage = 0; stage < num_stages_; ++stage) {
    const PickleValue* module = file(stage, slice).root().find("module");
    if (module == nullptr || !module->is_mapping()) continue;
    for (const auto& [name, value] : module->entries) {
      if (!name->is(Kind::text) || aliases.contains(name->text)) continue;
      collector.add(file(stage, slice), part(stage, slice).models.front(), name->text, *value);
    }
  }
}

std::map<std::string, Shape> DeepspeedModel::shapes(int64_t stage, int64_t slice) const {
  std::map<std::string, Shape> shapes;
  if (const PickleValue* groups = file(stage, slice).root().find("param_shapes")) {
    for (const PickleValue* group : groups->items) {
      for (auto& [name, shape] : shapes_of_group(file(stage, slice), *group)) shapes.emplace(name, std::move(shape));
    }
    return shapes;
  }
  for (const ModuleTensor& tensor : module(slice)) {
    if (!tensor.buffer) shapes.emplace(tensor.name, tensor.tensor.shape);
  }
  return shapes;
}

void DeepspeedModel::note_shapes() {
  if (num_slices_ == 1) return;
  for (int64_t slice = 0; slice < num_slices_; ++slice) {
    for (int64_t stage = 0; stage < num_stages_; ++stage) {
      for (const auto& [name, shape] : shapes(stage, slice)) slices_->note(name, slice, shape);
      if (const PickleValue* frozen = file(stage, slice).root().find("frozen_param_shapes")) {
        for (const auto& [name, shape] : shapes_of_group(file(stage, slice), *frozen)) {
          slices_->note(name, slice, shape);
        }
      }
    }
    for (const ModuleTensor& tensor : module(slice)) {
      if (tensor.buffer) slices_->note_buffer(tensor.name);
      slices_->note(tensor.name, slice, tensor.tensor.shape);
    }
  }
}

}  // namespace deeptide::checkpoint
