// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The header of a safetensors file: encodes it, and reads it without trusting it.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/file_io.h"

namespace deeptide::checkpoint {

/// The format's name for a dtype ("F32"). Errors: CheckpointError for a dtype that the format lacks.
std::string dtype_name(at::ScalarType dtype);
/// Bytes per element. Errors: as dtype_name().
int64_t element_bytes(at::ScalarType dtype);
/// Errors: CheckpointError for an unknown name; `where` is the file that has it.
at::ScalarType dtype_of_name(const std::string& name, const std::string& where);

struct Entry {
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> shape;
  int64_t begin = 0;  // bytes from the start of the data
  int64_t end = 0;
};
using Entries = std::map<std::string, Entry>;  // by key

struct Header {
  Entries entries;
  std::map<std::string, std::string> metadata;
  int64_t data_offset = 0;  // of the first data byte in the file
};

/// Encodes length, JSON and the spaces that align the data to 64 bytes. The format forbids gaps between tensors, so the
/// entries must be adjacent: place wide dtypes first to keep all of them aligned.
std::string encode_header(const Entries& entries, const std::map<std::string, std::string>& metadata);

/// Errors: CheckpointError when the header is malformed (length beyond the file, bad JSON, unknown dtype, shapes that
/// contradict offsets, overlaps, gaps) or when the file is shorter or longer than the header says.
Header read_header(const File& file);

/// The product of `shape`. Errors: CheckpointError for a negative extent or more than int64 holds.
int64_t numel_of(const std::vector<int64_t>& shape, const std::string& where);

}  // namespace deeptide::checkpoint
