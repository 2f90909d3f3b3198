// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Zip files of stored entries, as torch.save writes them, made by hand.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

namespace deeptide::checkpoint {

using ZipEntries = std::vector<std::pair<std::string, std::string>>;

inline void put_number(std::string& bytes, uint64_t number, int width) {
  for (int i = 0; i < width; ++i, number >>= 8) bytes += static_cast<char>(number & 0xff);
}

/// `long_numbers`: sizes and places in the 64-bit extra field, and a 64-bit directory.
inline std::string zip_of(const ZipEntries& entries, bool long_numbers = false, uint16_t method = 0) {
  std::string file, directory;
  for (const auto& [name, data] : entries) {
    const size_t offset = file.size();
    put_number(file, 0x04034b50, 4);
    put_number(file, 0, 22);
    put_number(file, name.size(), 2);
    put_number(file, 0, 2);
    file += name + data;
    put_number(directory, 0x02014b50, 4);
    put_number(directory, 0, 6);
    put_number(directory, method, 2);
    put_number(directory, 0, 8);
    put_number(directory, long_numbers ? 0xffffffff : data.size(), 4);
    put_number(directory, long_numbers ? 0xffffffff : data.size(), 4);
    put_number(directory, name.size(), 2);
    put_number(directory, long_numbers ? 28 : 0, 2);
    put_number(directory, 0, 10);
    put_number(directory, long_numbers ? 0xffffffff : offset, 4);
    directory += name;
    if (!long_numbers) continue;
    put_number(directory, 1, 2);
    put_number(directory, 24, 2);
    for (const uint64_t number : {data.size(), data.size(), offset}) put_number(directory, number, 8);
  }
  const size_t begin = file.size();
  file += directory;
  if (long_numbers) {
    const size_t end = file.size();
    put_number(file, 0x06064b50, 4);
    put_number(file, 44, 8);
    put_number(file, 0, 12);
    put_number(file, entries.size(), 8);
    put_number(file, entries.size(), 8);
    put_number(file, directory.size(), 8);
    put_number(file, begin, 8);
    put_number(file, 0x07064b50, 4);
    put_number(file, 0, 4);
    put_number(file, end, 8);
    put_number(file, 1, 4);
  }
  put_number(file, 0x06054b50, 4);
  put_number(file, 0, 4);
  put_number(file, entries.size(), 2);
  put_number(file, entries.size(), 2);
  put_number(file, long_numbers ? 0xffffffff : directory.size(), 4);
  put_number(file, long_numbers ? 0xffffffff : begin, 4);
  put_number(file, 0, 2);
  return file;
}

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

}  // namespace deeptide::checkpoint
