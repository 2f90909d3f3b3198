// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes zip archives of stored records. All records have zip64 sizes, so that one layout serves every size.
#include "checkpoint/offline/writers/zip_file.h"

#include <array>
#include <bit>
#include <cstring>
#include <utility>

namespace deeptide::checkpoint {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kLocalBytes = 30;
constexpr int64_t kCrcOffset = 14;  // in a record's header
constexpr uint16_t kVersion = 45;   // of zip64
constexpr uint32_t kIn64 = 0xffffffff;
constexpr uint16_t kZip64Field = 0x0001;
constexpr uint16_t kPadField = 0x4246;  // "FB", as torch names it

using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0xEDB88320u : 0u);
    tables[0][byte] = value;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xff];
    }
  }
  return tables;
}

// CRC-32 of the zip format, eight bytes at a time. zlib would be a package more to build and to carry in wheels.
uint32_t crc32(uint32_t crc, const unsigned char* data, int64_t bytes) {
  static constexpr CrcTables kTables = make_crc_tables();
  static_assert(std::endian::native == std::endian::little);
  crc = ~crc;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; bytes > 0; --bytes, ++data) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xff];
  return ~crc;
}

template <typename T>
void put(std::string& out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    out += static_cast<char>(static_cast<uint64_t>(value) >> (8 * i));
  }
}
void put16(std::string& out, int64_t value) { put(out, static_cast<uint16_t>(value)); }
void put32(std::string& out, uint32_t value) { put(out, value); }
void put64(std::string& out, int64_t value) { put(out, static_cast<uint64_t>(value)); }

// The fields that local headers and the directory share: flags (names are UTF-8), stored, a date that is none, CRC.
void put_common(std::string& out, uint32_t crc, size_t name_bytes, size_t extra_bytes) {
  put16(out, kVersion);
  put16(out, 0x0800);
  put16(out, 0);
  put32(out, 0x00210000);  // 1980-01-01
  put32(out, crc);
  put32(out, kIn64);
  put32(out, kIn64);
  put16(out, static_cast<int64_t>(name_bytes));
  put16(out, static_cast<int64_t>(extra_bytes));
}

std::string sizes_field(int64_t bytes) {
  std::string field;
  put16(field, kZip64Field);
  put16(field, 16);
  put64(field, bytes);
  put64(field, bytes);
  return field;
}

}  // namespace

void ZipFile::begin(const std::string& name, int64_t bytes) {
  end_record();
  std::string extra = sizes_field(bytes);
  const int64_t unpadded = offset_ - start_ + kLocalBytes + std::ssize(name) + std::ssize(extra) + 4;
  const int64_t padding = (kAlignment - unpadded % kAlignment) % kAlignment;
  put16(extra, kPadField);
  put16(extra, padding);
  extra.append(static_cast<size_t>(padding), 'Z');
  std::string header;
  put32(header, 0x04034b50);
  put_common(header, 0, name.size(), extra.size());
  records_.push_back({name, bytes, offset_ - start_});
  write(header + name + extra);
  open_ = true;
}

void ZipFile::append(const void* data, int64_t bytes) {
  records_.back().crc = crc32(records_.back().crc, static_cast<const unsigned char*>(data), bytes);
  file_.write_at(data, bytes, offset_);
  file_.will_sync(bytes, offset_);
  offset_ += bytes;
}

void ZipFile::add(const std::string& name, const std::string& contents) {
  begin(name, std::ssize(contents));
  append(contents.data(), std::ssize(contents));
}

void ZipFile::end_record() {
  if (!std::exchange(open_, false)) return;
  std::string crc;
  put32(crc, records_.back().crc);
  file_.write_at(crc.data(), std::ssize(crc), start_ + records_.back().offset + kCrcOffset);
}

int64_t ZipFile::finish() {
  end_record();
  const int64_t directory = offset_ - start_;
  for (const Record& record : records_) {
    std::string extra = sizes_field(record.bytes);
    extra[2] = 24;  // the offset as well
    put64(extra, record.offset);
    std::string entry;
    put32(entry, 0x02014b50);
    put16(entry, kVersion);
    put_common(entry, record.crc, record.name.size(), extra.size());
    put16(entry, 0);  // comment, disk and attributes
    put16(entry, 0);
    put16(entry, 0);
    put32(entry, 0);
    put32(entry, kIn64);
    write(entry + record.name + extra);
  }
  const int64_t end = offset_ - start_;
  std::string tail;
  put32(tail, 0x06064b50);
  put64(tail, 44);
  put16(tail, kVersion);
  put16(tail, kVersion);
  put32(tail, 0);
  put32(tail, 0);
  put64(tail, std::ssize(records_));
  put64(tail, std::ssize(records_));
  put64(tail, end - directory);
  put64(tail, directory);
  put32(tail, 0x07064b50);
  put32(tail, 0);
  put64(tail, end);
  put32(tail, 1);
  put32(tail, 0x06054b50);
  put32(tail, 0);
  put32(tail, 0xffffffff);  // counts, in zip64
  put32(tail, kIn64);
  put32(tail, kIn64);
  put16(tail, 0);
  write(tail);
  return offset_;
}

void ZipFile::write(const std::string& bytes) {
  file_.write_at(bytes.data(), std::ssize(bytes), offset_);
  offset_ += std::ssize(bytes);
}

}  // namespace deeptide::checkpoint
