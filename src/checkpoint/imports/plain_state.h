// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Values of a torch file as JSON: what JSON cannot say is noted beside it, so that Python gets back what was saved.
#pragma once

#include <string>
#include <vector>

#include "base/libraries/nlohmann.h"
#include "checkpoint/imports/archives/torch_file.h"

namespace deeptide::checkpoint {

/// Converts values, one after the other, into members of one JSON object.
/// Tuples become lists, tensors and numpy's arrays lists of numbers, keys that are integers text: `notes` says where.
/// An object of a class becomes {"__class__": "module.name", …} with what it held; no code makes one of it.
class PlainState {
 public:
  explicit PlainState(const TorchFile& file) : file_(file) {}

  /// False, with a line in `left_out`, for a value that holds itself, is nested too deep or is too large.
  bool add(const std::string& key, const PickleValue& value);

  nlohmann::json values = nlohmann::json::object();
  /// By kind, "tuples", "tensors", "arrays", "integer_keys", paths into `values`, inner ones first; of tensors and
  /// arrays [path, dtype, shape].
  nlohmann::json notes = nlohmann::json::object();
  std::vector<std::string> left_out;

 private:
  using Path = std::vector<nlohmann::json>;

  nlohmann::json convert(const PickleValue& value, Path& path);
  nlohmann::json number(double real) const;
  nlohmann::json items_of(const PickleValue& value, Path& path);
  nlohmann::json entries_of(const PickleValue& value, Path& path);
  nlohmann::json object(const PickleValue& value, Path& path);
  nlohmann::json elements(at::ScalarType dtype, const Shape& shape, const std::string& bytes, const char* kind,
                          const Path& path);
  nlohmann::json tensor(const TorchTensor& tensor, const Path& path);
  bool numpy(const PickleValue& value, const Path& path, nlohmann::json& made);

  const TorchFile& file_;
  int64_t num_values_ = 0;
};

}  // namespace deeptide::checkpoint
