// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Maps, checks and writes index files. Format: magic, version, type, counts, row lengths, row offsets, documents.
#include "deeptide/indexed_dataset.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>

#include "base/resources.h"

namespace deeptide {
namespace {

constexpr std::array<char, 9> kMagic = {'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'};
constexpr size_t kHeaderBytes = kMagic.size() + 8 + 1 + 8 + 8;

[[noreturn]] void refuse_file(const std::string& path, const std::string& what) {
  throw ConfigError("indexed dataset: " + path + ": " + what);
}

/// A file in memory, read only: a forked child may read on.
class Mapping {
 public:
  explicit Mapping(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) refuse_file(path, std::string("cannot be opened: ") + std::strerror(errno));
    struct stat about = {};
    const bool known = ::fstat(file, &about) == 0;
    size_ = known ? static_cast<size_t>(about.st_size) : 0;
    // An empty file cannot be mapped and has nothing to map.
    void* address = nullptr;
    int error = 0;
    if (size_ > 0) {
      take_or_give_back([&] {
        address = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
        error = errno;
        return address != MAP_FAILED;
      });
    }
    ::close(file);
    if (!known || address == MAP_FAILED) refuse_file(path, std::string("cannot be read: ") + std::strerror(error));
    data_ = static_cast<const std::byte*>(address);
  }
  ~Mapping() {
    if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// Numbers in these files are not aligned.
template <typename T>
T load(std::span<const std::byte> bytes, size_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
bool holds(int64_t value) {
  if constexpr (std::is_same_v<T, uint64_t>) return value >= 0;
  if constexpr (!std::is_same_v<T, uint64_t>) {
    return value >= static_cast<int64_t>(std::numeric_limits<T>::min()) &&
           value <= static_cast<int64_t>(std::numeric_limits<T>::max());
  }
}

/// Calls `use` with a zero of the type.
template <typename Use>
auto with_type(RowType type, const Use& use) {
  switch (type) {
    case RowType::u8:
      return use(uint8_t{});
    case RowType::i8:
      return use(int8_t{});
    case RowType::i16:
      return use(int16_t{});
    case RowType::i32:
      return use(int32_t{});
    case RowType::i64:
      return use(int64_t{});
    case RowType::u16:
      return use(uint16_t{});
    case RowType::u32:
      return use(uint32_t{});
    case RowType::u64:
      return use(uint64_t{});
  }
  throw ConfigError("indexed dataset: type code " + std::to_string(static_cast<int>(type)) + ", expected 1 to 8");
}

template <typename T>
void write_number(std::ofstream& file, T value) {
  file.write(reinterpret_cast<const char*>(&value), sizeof(value));
}

}  // namespace

int64_t row_type_size(RowType type) {
  return with_type(type, [](auto zero) { return static_cast<int64_t>(sizeof(zero)); });
}

RowType smallest_row_type(int64_t low, int64_t high) {
  const auto unsigned_types = {RowType::u8, RowType::u16, RowType::u32, RowType::u64};
  const auto signed_types = {RowType::i8, RowType::i16, RowType::i32, RowType::i64};
  for (const RowType type : low >= 0 ? unsigned_types : signed_types) {
    const bool fits =
        with_type(type, [&](auto zero) { return holds<decltype(zero)>(low) && holds<decltype(zero)>(high); });
    if (fits) return type;
  }
  return RowType::i64;
}

struct IndexedDataset::Files {
  std::string name;
  Mapping index, data;
  RowType type = RowType::u8;
  size_t rows = 0, documents = 0;
  std::span<const std::byte> lengths, offsets, document_rows;

  explicit Files(const std::string& path) : name(path), index(path + ".idx"), data(path + ".bin") {
    read_header();
    const std::span<const std::byte> bytes = index.bytes().subspan(kHeaderBytes);
    // Bounded first, so that the sums below do not overflow.
    if (rows > bytes.size() || documents > bytes.size() || bytes.size() < rows * 12 + documents * 8) {
      refuse_file(name + ".idx", "is short: " + std::to_string(index.bytes().size()) + " bytes for " +
                                     std::to_string(rows) + " rows and " + std::to_string(documents) +
                                     " documents; write it again");
    }
    lengths = bytes.first(rows * 4);
    offsets = bytes.subspan(rows * 4, rows * 8);
    document_rows = bytes.subspan(rows * 12, documents * 8);
  }

  void read_header() {
    const std::span<const std::byte> bytes = index.bytes();
    if (bytes.size() < kHeaderBytes || std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
      refuse_file(name + ".idx", "is no index of a memory-mapped data set: it does not begin with MMIDIDX");
    }
    std::span<const std::byte> rest = bytes.subspan(kMagic.size());
    if (const auto version = load<uint64_t>(rest, 0); version != 1) {
      refuse_file(name + ".idx", "has version " + std::to_string(version) + ", expected 1");
    }
    const auto code = std::to_integer<int>(rest[8]);
    if (code < 1 || code > 8) refuse_file(name + ".idx", "has type code " + std::to_string(code) + ", expected 1 to 8");
    type = static_cast<RowType>(code);
    rest = rest.subspan(9);
    rows = load<uint64_t>(rest, 0);
    documents = load<uint64_t>(rest, 1);
  }
};

IndexedDataset::IndexedDataset(const std::string& name) : files_(std::make_shared<const Files>(name)) {}

int64_t IndexedDataset::num_rows() const { return static_cast<int64_t>(files_->rows); }
RowType IndexedDataset::type() const { return files_->type; }
std::span<const std::byte> IndexedDataset::lengths_bytes() const { return files_->lengths; }

int64_t IndexedDataset::length(int64_t row) const {
  if (row < 0 || row >= num_rows()) {
    refuse_file(files_->name, "row " + std::to_string(row) + ", expected 0 to " + std::to_string(num_rows() - 1));
  }
  return load<int32_t>(files_->lengths, static_cast<size_t>(row));
}

std::vector<int64_t> IndexedDataset::documents() const {
  std::vector<int64_t> starts(files_->documents);
  if (!starts.empty()) std::memcpy(starts.data(), files_->document_rows.data(), files_->document_rows.size());
  return starts;
}

std::span<const std::byte> IndexedDataset::bytes(int64_t row) const {
  const int64_t size = length(row) * row_type_size(type());
  const auto start = load<int64_t>(files_->offsets, static_cast<size_t>(row));
  const auto total = static_cast<int64_t>(files_->data.bytes().size());
  if (size < 0 || start < 0 || start > total || size > total - start) {
    refuse_file(files_->name + ".bin", "is short: row " + std::to_string(row) + " ends after byte " +
                                           std::to_string(start + size) + " of " + std::to_string(total));
  }
  return files_->data.bytes().subspan(static_cast<size_t>(start), static_cast<size_t>(size));
}

std::vector<int64_t> IndexedDataset::row(int64_t row) const {
  const std::span<const std::byte> from = bytes(row);
  std::vector<int64_t> numbers(static_cast<size_t>(length(row)));
  with_type(type(), [&](auto zero) {
    for (size_t i = 0; i < numbers.size(); ++i) {
      const auto number = load<decltype(zero)>(from, i);
      if (std::is_same_v<decltype(zero), uint64_t> && static_cast<int64_t>(number) < 0) {
        refuse_file(files_->name, "row " + std::to_string(row) + " holds a number beyond 63 bits");
      }
      numbers[i] = static_cast<int64_t>(number);
    }
  });
  return numbers;
}

struct IndexedDatasetWriter::Files {
  std::string name;
  RowType type;
  std::ofstream data;
  std::vector<int32_t> lengths;
  std::vector<int64_t> documents = {0};
  bool finished = false;
};

IndexedDatasetWriter::IndexedDatasetWriter(const std::string& name, RowType type)
    : files_(new Files{name, type, std::ofstream(name + ".bin", std::ios::binary | std::ios::trunc), {}}) {
  if (!files_->data.is_open()) refuse_file(name + ".bin", std::string("cannot be made: ") + std::strerror(errno));
}

IndexedDatasetWriter::~IndexedDatasetWriter() = default;
IndexedDatasetWriter::IndexedDatasetWriter(IndexedDatasetWriter&&) noexcept = default;

void IndexedDatasetWriter::add_row(std::span<const int64_t> numbers) {
  with_type(files_->type, [&](auto zero) {
    using T = decltype(zero);
    std::vector<T> row(numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (!holds<T>(numbers[i])) {
        refuse_file(files_->name, "the type of " + std::to_string(sizeof(T)) + " bytes does not hold " +
                                      std::to_string(numbers[i]) + "; write the files with a larger type");
      }
      row[i] = static_cast<T>(numbers[i]);
    }
    add_bytes(std::as_bytes(std::span(row)));
  });
}

void IndexedDatasetWriter::add_bytes(std::span<const std::byte> bytes) {
  const auto length = static_cast<int64_t>(bytes.size()) / row_type_size(files_->type);
  if (length > std::numeric_limits<int32_t>::max()) {
    refuse_file(files_->name, "a row of " + std::to_string(length) + " numbers; the format holds less than 2^31");
  }
  files_->data.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  files_->lengths.push_back(static_cast<int32_t>(length));
}

void IndexedDatasetWriter::end_document() { files_->documents.push_back(static_cast<int64_t>(files_->lengths.size())); }

void IndexedDatasetWriter::append(const std::string& name) {
  const IndexedDataset other(name);
  if (other.type() != files_->type) refuse_file(name, "cannot be appended to " + files_->name + ": the types differ");
  const auto before = static_cast<int64_t>(files_->lengths.size());
  for (int64_t row = 0; row < other.num_rows(); ++row) add_bytes(other.bytes(row));
  const std::vector<int64_t> starts = other.documents();
  for (size_t i = 1; i < starts.size(); ++i) files_->documents.push_back(before + starts[i]);
}

void IndexedDatasetWriter::finish() {
  if (files_->finished) return;
  files_->data.close();
  std::ofstream index(files_->name + ".idx", std::ios::binary | std::ios::trunc);
  index.write(kMagic.data(), kMagic.size());
  write_number(index, uint64_t{1});
  write_number(index, static_cast<uint8_t>(files_->type));
  write_number(index, uint64_t{files_->lengths.size()});
  write_number(index, uint64_t{files_->documents.size()});
  for (const int32_t length : files_->lengths) write_number(index, length);
  int64_t offset = 0;
  for (const int32_t length : files_->lengths) {
    write_number(index, offset);
    offset += length * row_type_size(files_->type);
  }
  for (const int64_t start : files_->documents) write_number(index, start);
  index.close();
  if (files_->data.fail() || index.fail()) refuse_file(files_->name, "cannot be written; is the disk full?");
  files_->finished = true;
}

}  // namespace deeptide
