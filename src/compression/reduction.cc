// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A student begins as some of its teacher's layers.
#include <ATen/core/grad_mode.h>

#include <utility>

#include "base/libraries/format.h"
#include "compression/model.h"

namespace deeptide::compression {
namespace {

const std::string kPath = std::string(kSection) + ".layer_reduction";

std::shared_ptr<torch::nn::Module> module_of(torch::nn::Module& model, const std::string& name, const char* whose) {
  const auto modules = model.named_modules("", /*include_self=*/false);
  if (const auto* found = modules.find(name)) return *found;
  throw ConfigError(format_text("{}: the {} has no module {}; give a name that both models have", kPath, whose, name));
}

std::string shape_text(const at::Tensor& tensor) { return "[" + join_text(tensor.sizes(), ", ") + "]"; }

void copy(torch::nn::Module& student, torch::nn::Module& teacher, const std::string& name) {
  const at::NoGradGuard no_grad;
  const auto theirs = teacher.named_parameters();
  for (const auto& item : student.named_parameters()) {
    const at::Tensor* source = theirs.find(item.key());
    if (source == nullptr || source->sizes() != item.value().sizes()) {
      throw ConfigError(format_text("{}: the student's {}.{} has the shape {}, the teacher's {}; layers must be alike",
                                    kPath, name, item.key(), shape_text(item.value()),
                                    source == nullptr ? "none" : shape_text(*source)));
    }
    item.value().copy_(*source);
  }
}

}  // namespace

void reduce_layers(torch::nn::Module& student, torch::nn::Module* teacher, const Json& section) {
  if (teacher == nullptr) {
    throw ConfigError("compression_training.layer_reduction.enabled: true needs a teacher; give init_compression one");
  }
  const auto get = [&](const char* key) { return section.contains(key) ? section.at(key) : Json(); };
  const Json prefix = get("module_name_prefix"), layers = get("teacher_layer"), count = get("keep_number_layer");
  if (!prefix.is_string() || prefix.get<std::string>().empty() || !layers.is_array() || layers.empty()) {
    throw ConfigError(kPath + ": needs module_name_prefix and teacher_layer; give both");
  }
  if (count.is_number() && count.get<size_t>() != layers.size()) {
    throw ConfigError(format_text("{}.keep_number_layer: got {}, and teacher_layer names {}; make them equal", kPath,
                                  count.get<size_t>(), layers.size()));
  }
  std::vector<std::pair<std::string, std::string>> pairs;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto begin = prefix.get<std::string>() + ".";
    pairs.emplace_back(begin + std::to_string(i), begin + std::to_string(layers[i].get<int64_t>()));
  }
  const Json others = get("other_module_name");
  for (const Json& name : others.is_array() ? others : Json::array()) {
    pairs.emplace_back(name.get<std::string>(), name.get<std::string>());
  }
  for (const auto& [name, source] : pairs) {
    const auto mine = module_of(student, name, "student");
    copy(*mine, *module_of(*teacher, source, "teacher"), name);
  }
}

}  // namespace deeptide::compression
