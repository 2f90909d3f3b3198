// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A file of torch.save: its values, and where its tensors' elements lie.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/format/region.h"
#include "checkpoint/imports/archives/pickle.h"
#include "checkpoint/imports/archives/zip_archive.h"

namespace deeptide::checkpoint {

/// A tensor of a torch file, checked to lie within its storage.
struct TorchTensor {
  at::ScalarType dtype = at::ScalarType::Float;
  Shape shape;
  Shape strides;       // in elements
  int64_t offset = 0;  // of the first element, bytes from the start of the file

  int64_t numel() const;
  bool is_contiguous() const;
  /// Elements from the first to the last in memory, gaps included; 0 without elements.
  int64_t span() const;
};

/// Reads the zip format of torch 1.6 and later. Cheap where it holds many tensors: their elements are not read.
class TorchFile {
 public:
  /// Errors: CheckpointError naming the file and what is wrong with it.
  explicit TorchFile(const std::string& path);

  const std::string& path() const { return archive_.file().path(); }
  const File& file() const { return archive_.file(); }
  const PickleValue& root() const { return pickle_.root(); }
  /// The dense tensor or parameter that `torch.load` would make; none for any other value.
  /// Errors: CheckpointError when it is one that has no such storage, or leaves it.
  std::optional<TorchTensor> tensor(const PickleValue& value) const;
  /// A number, also if it is in a tensor of one element or in an enumeration; none for any other value.
  std::optional<double> number(const PickleValue& value) const;

 private:
  TorchTensor rebuilt(const PickleValue& arguments, bool typed) const;

  ZipArchive archive_;
  std::string prefix_;  // of the entries' names, with its '/'
  Pickle pickle_;
};

/// The elements of a torch.Size, or of a list or tuple of integers; none for any other value.
std::optional<Shape> shape_of(const PickleValue& value);

}  // namespace deeptide::checkpoint
