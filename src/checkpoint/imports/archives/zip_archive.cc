// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads zip directories. Source: PKWARE's APPNOTE.TXT, 4.3.7 (local headers) to 4.3.16 (the directory's end).
#include "checkpoint/imports/archives/zip_archive.h"

#include <algorithm>
#include <cstring>

#include "checkpoint/format/json_field.h"

namespace deeptide::checkpoint {
namespace {

constexpr uint32_t kLocalHeader = 0x04034b50;
constexpr uint32_t kDirectoryRecord = 0x02014b50;
constexpr uint32_t kDirectoryEnd = 0x06054b50;
constexpr uint32_t kLongEnd = 0x06064b50;
constexpr uint32_t kLongEndLocator = 0x07064b50;

constexpr int64_t kLocalHeaderBytes = 30;
constexpr size_t kRecordBytes = 46;
constexpr int64_t kEndBytes = 22;
constexpr int64_t kLocatorBytes = 20;
constexpr int64_t kLongEndBytes = 56;
constexpr int64_t kMaxDirectoryBytes = int64_t{256} << 20;
constexpr uint16_t kLongNumbers = 1;         // the extra field of numbers that do not fit 32 bits
constexpr uint64_t kElsewhere = 0xffffffff;  // such a number is there

// `position` must be within `text` with room for the number.
template <typename Number>
Number number_at(const std::string& text, size_t position) {
  Number number;
  std::memcpy(&number, text.data() + position, sizeof number);
  return number;
}

std::string bytes_at(const File& file, int64_t offset, int64_t count) {
  std::string text(static_cast<size_t>(count), '\0');
  file.read_at(text.data(), count, offset);
  return text;
}

struct Directory {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

/// The beginning of the directory's end record: a comment of up to 64 KiB may follow it.
int64_t find_end(const File& file, int64_t file_bytes) {
  const int64_t span = std::min(file_bytes, kEndBytes + 0xffff);
  const std::string tail = bytes_at(file, file_bytes - span, span);
  for (int64_t at = span - kEndBytes; at >= 0; --at) {
    if (number_at<uint32_t>(tail, static_cast<size_t>(at)) == kDirectoryEnd) return file_bytes - span + at;
  }
  malformed(file.path(), "it is no zip file, or was truncated: it has no directory");
}

Directory find_directory(const File& file, int64_t file_bytes) {
  const int64_t end = find_end(file, file_bytes);
  const std::string record = bytes_at(file, end, kEndBytes);
  Directory directory{number_at<uint32_t>(record, 16), number_at<uint32_t>(record, 12)};
  if (end < kLocatorBytes) return directory;
  const std::string locator = bytes_at(file, end - kLocatorBytes, kLocatorBytes);
  if (number_at<uint32_t>(locator, 0) != kLongEndLocator) return directory;
  const auto offset = number_at<uint64_t>(locator, 8);
  if (file_bytes < kLongEndBytes || offset > static_cast<uint64_t>(file_bytes - kLongEndBytes)) {
    malformed(file.path(), "the end of its 64-bit directory is beyond the file");
  }
  const std::string longer = bytes_at(file, static_cast<int64_t>(offset), kLongEndBytes);
  if (number_at<uint32_t>(longer, 0) != kLongEnd) malformed(file.path(), "its 64-bit directory has no end");
  return {number_at<uint64_t>(longer, 48), number_at<uint64_t>(longer, 40)};
}

/// Takes the next number of the extra field in the place of `number`, if that says so.
void take_longer(const std::string& extra, size_t& position, size_t end, uint64_t& number, const std::string& path) {
  if (number != kElsewhere) return;
  if (end - position < 8) malformed(path, "an entry lacks its 64-bit numbers");
  number = number_at<uint64_t>(extra, position);
  position += 8;
}

}  // namespace

ZipArchive::ZipArchive(const std::string& path) : file_(File::open(path)), file_bytes_(file_.size()) {
  if (file_bytes_ < kEndBytes) {
    malformed(path, "it has " + std::to_string(file_bytes_) + " bytes, too few for a zip file");
  }
  read_directory();
}

void ZipArchive::read_directory() {
  const Directory where = find_directory(file_, file_bytes_);
  const auto size = static_cast<uint64_t>(file_bytes_);
  if (where.offset > size || where.bytes > size - where.offset || where.bytes > kMaxDirectoryBytes) {
    malformed(file_.path(), "its directory is beyond the file (was it truncated?)");
  }
  const std::string directory = bytes_at(file_, static_cast<int64_t>(where.offset), static_cast<int64_t>(where.bytes));
  size_t position = 0;
  while (position < directory.size()) add_record(directory, position);
}

void ZipArchive::add_record(const std::string& directory, size_t& position) {
  const size_t left = directory.size() - position;
  if (left < kRecordBytes || number_at<uint32_t>(directory, position) != kDirectoryRecord) {
    malformed(file_.path(), "its directory has something that is no entry");
  }
  const auto flags = number_at<uint16_t>(directory, position + 8);
  const auto method = number_at<uint16_t>(directory, position + 10);
  uint64_t packed = number_at<uint32_t>(directory, position + 20);
  uint64_t bytes = number_at<uint32_t>(directory, position + 24);
  const size_t name_length = number_at<uint16_t>(directory, position + 28);
  const size_t extra_length = number_at<uint16_t>(directory, position + 30);
  const size_t comment_length = number_at<uint16_t>(directory, position + 32);
  uint64_t offset = number_at<uint32_t>(directory, position + 42);
  if (left - kRecordBytes < name_length + extra_length + comment_length) {
    malformed(file_.path(), "an entry is beyond its directory");
  }
  const std::string name = directory.substr(position + kRecordBytes, name_length);
  size_t at = position + kRecordBytes + name_length;
  const size_t end = at + extra_length;
  while (end - at >= 4) {
    const auto id = number_at<uint16_t>(directory, at);
    const size_t length = number_at<uint16_t>(directory, at + 2);
    at += 4;
    if (length > end - at) malformed(file_.path(), "an extra field is beyond its entry");
    if (id == kLongNumbers) {
      size_t next = at;
      for (uint64_t* number : {&bytes, &packed, &offset}) {
        take_longer(directory, next, at + length, *number, file_.path());
      }
    }
    at += length;
  }
  position = end + comment_length;
  const auto size = static_cast<uint64_t>(file_bytes_);
  if (offset > size || bytes > size) malformed(file_.path(), "the entry '" + name.substr(0, 80) + "' is beyond it");
  const Header header{static_cast<int64_t>(offset), static_cast<int64_t>(bytes),
                      method == 0 && packed == bytes && (flags & 1) == 0};
  if (!headers_.emplace(name, header).second) {
    malformed(file_.path(), "it has two entries '" + name.substr(0, 80) + "'");
  }
}

ZipArchive::Span ZipArchive::find(const std::string& name) const {
  const auto found = headers_.find(name);
  if (found == headers_.end()) malformed(file_.path(), "it has no entry '" + name.substr(0, 80) + "'");
  const Header& header = found->second;
  if (!header.stored) malformed(file_.path(), "the entry '" + name.substr(0, 80) + "' is compressed or encrypted");
  if (header.offset > file_bytes_ - kLocalHeaderBytes) malformed(file_.path(), "an entry's header is beyond it");
  const std::string local = bytes_at(file_, header.offset, kLocalHeaderBytes);
  if (number_at<uint32_t>(local, 0) != kLocalHeader) malformed(file_.path(), "an entry has no header of its own");
  const int64_t begin =
      header.offset + kLocalHeaderBytes + number_at<uint16_t>(local, 26) + number_at<uint16_t>(local, 28);
  if (begin > file_bytes_ || header.bytes > file_bytes_ - begin) {
    malformed(file_.path(), "the entry '" + name.substr(0, 80) + "' is beyond it (was it truncated?)");
  }
  return {begin, header.bytes};
}

std::string ZipArchive::name_with_end(const std::string& end) const {
  std::string name;
  for (const auto& [candidate, header] : headers_) {
    if (!candidate.ends_with(end)) continue;
    if (!name.empty()) malformed(file_.path(), "it has several entries '…" + end + "'");
    name = candidate;
  }
  if (name.empty()) malformed(file_.path(), "it has no entry '…" + end + "': torch.save did not write it");
  return name;
}

}  // namespace deeptide::checkpoint
