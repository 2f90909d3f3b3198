// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds the tensors in others' weight files: safetensors and torch's, one file or several with an index.
#pragma once

#include <map>
#include <set>
#include <string>

#include "checkpoint/format/manifest.h"
#include "checkpoint/imports/archives/torch_file.h"

namespace deeptide::checkpoint {

/// A tensor's file, and its place in it.
struct WeightPlace {
  std::string file;  // in the folder of the weights
  TorchTensor tensor;
};

struct WeightPlaces {
  std::string folder;
  std::map<std::string, WeightPlace> tensors;  // by name
  std::set<std::string> further_names;         // of elements that have a name before, in the order of their file
  std::set<std::string> no_tensors;            // entries of other kinds, which are left out

  std::string path_of(const WeightPlace& place) const { return folder + "/" + place.file; }
};

/// `path`: a file, or a folder as save_pretrained writes it. An index's names lead to files of its folder only.
/// Errors: CheckpointError naming the file and what is wrong with it.
WeightPlaces find_weights(const std::string& path);

/// Renames tensors of a base model for a model with a head ("h.0.weight" to "transformer.h.0.weight"), or the other way
/// round, as from_pretrained does: where no name is the model's, and most are with one prefix more or less.
void fit_names(WeightPlaces& places, const std::set<std::string>& names);

/// The weights as tables of a checkpoint without optimizer states, for Reader: each name is a parameter's, also where
/// several share elements.
ManifestTable weights_table(const WeightPlaces& places);

}  // namespace deeptide::checkpoint
