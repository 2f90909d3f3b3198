// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Rows of integers in two files, as Megatron and DeepSpeed write them: NAME.bin holds the numbers, NAME.idx the rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "deeptide/errors.h"

namespace deeptide {

/// The types of rows, by the code that files hold.
enum class RowType : uint8_t { u8 = 1, i8, i16, i32, i64, u16, u32, u64 };

/// Bytes of one number.
DEEPTIDE_API int64_t row_type_size(RowType type);
/// The smallest type that holds `low` to `high`; unsigned where `low` is not negative.
DEEPTIDE_API RowType smallest_row_type(int64_t low, int64_t high);

/// Reads such files, mapped into memory: copies share the mapping.
class DEEPTIDE_API IndexedDataset {
 public:
  /// `name`: the path without its suffix. Errors: ConfigError naming the file that is missing, short or of another
  /// kind.
  explicit IndexedDataset(const std::string& name);

  int64_t num_rows() const;
  RowType type() const;
  /// Row lengths, in numbers.
  std::span<const std::byte> lengths_bytes() const;
  int64_t length(int64_t row) const;
  /// The first row of each document.
  std::vector<int64_t> documents() const;
  /// The bytes of a row, `length(row)` numbers of `type()`; they live as long as a copy of this object.
  /// Errors: ValueError for a row that is not there.
  std::span<const std::byte> bytes(int64_t row) const;
  /// The row as 64-bit integers. Errors: likewise, or for a number that these do not hold.
  std::vector<int64_t> row(int64_t row) const;

 private:
  struct Files;
  std::shared_ptr<const Files> files_;
};

/// Writes such files: rows, ends of documents, finish().
class DEEPTIDE_API IndexedDatasetWriter {
 public:
  /// `name`: the path without its suffix; existing files are replaced. Errors: ConfigError if a file cannot be made.
  IndexedDatasetWriter(const std::string& name, RowType type);
  ~IndexedDatasetWriter();
  IndexedDatasetWriter(IndexedDatasetWriter&&) noexcept;

  /// Errors: ConfigError for a number that the type does not hold.
  void add_row(std::span<const int64_t> numbers);
  /// Adds `length` numbers of the writer's own type, as they lie in memory.
  void add_bytes(std::span<const std::byte> bytes);
  void end_document();
  /// Appends the rows and documents of files of the same type. Errors: ConfigError for another type.
  void append(const std::string& name);
  /// Writes the index. Errors: ConfigError if the disk refuses.
  void finish();

 private:
  struct Files;
  std::unique_ptr<Files> files_;
};

}  // namespace deeptide
