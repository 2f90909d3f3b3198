// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Maps weight files: tensors are views of their pages.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <map>

#include "checkpoint/imports/archives/mapped_file.h"
#include "checkpoint/imports/weights/weight_places.h"
#include "deeptide/weights.h"

namespace deeptide {

using checkpoint::MappedFile;

struct WeightFile::Contents {
  explicit Contents(const std::string& path) : places(checkpoint::find_weights(path)) {
    for (const auto& [name, place] : places.tensors) {
      auto& pages = files[place.file];
      if (!pages) pages = std::make_shared<MappedFile>(places.path_of(place));
    }
  }

  checkpoint::WeightPlaces places;
  std::map<std::string, std::shared_ptr<MappedFile>> files;
};

WeightFile::WeightFile(const std::string& path) : contents_(std::make_unique<Contents>(path)) {}
WeightFile::~WeightFile() = default;
WeightFile::WeightFile(WeightFile&&) noexcept = default;
WeightFile& WeightFile::operator=(WeightFile&&) noexcept = default;

std::vector<std::string> WeightFile::names() const {
  std::vector<std::string> names;
  for (const auto& [name, place] : contents_->places.tensors) names.push_back(name);
  return names;
}

void WeightFile::fit(const std::vector<std::string>& names) {
  checkpoint::fit_names(contents_->places, {names.begin(), names.end()});
}

bool WeightFile::has(const std::string& name) const { return contents_->places.tensors.contains(name); }

at::Tensor WeightFile::tensor(const std::string& name) const {
  const auto found = contents_->places.tensors.find(name);
  if (found == contents_->places.tensors.end()) throw CheckpointError("the weights have no tensor '" + name + "'");
  const auto& [file, place] = found->second;
  const auto options = at::TensorOptions().dtype(place.dtype);
  const auto& pages = contents_->files.at(file);
  char* data = pages->at(place.offset);
  if (reinterpret_cast<uintptr_t>(data) % c10::elementSize(place.dtype) == 0) {
    return at::from_blob(
        data, place.shape, place.strides, [kept = pages](void*) {}, options);
  }
  // Both formats let tensors begin at any byte.
  const at::Tensor copy = at::empty({place.span()}, options);
  std::memcpy(copy.mutable_data_ptr(), data, copy.nbytes());
  return copy.as_strided(place.shape, place.strides);
}

}  // namespace deeptide
