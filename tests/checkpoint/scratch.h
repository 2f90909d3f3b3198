// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A folder that is gone when the test ends, and what the checkpoint tests share.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "checkpoint/format/file_io.h"
#include "checkpoint/load/reader.h"
#include "checkpoint/save/writer.h"

namespace deeptide::checkpoint {

class Scratch {
 public:
  Scratch() {
    std::string name = (std::filesystem::temp_directory_path() / "deeptide_test_XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no scratch folder at " + name);
    path_ = name;
  }
  Scratch(const Scratch&) = delete;
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

/// The inverse of Role::text() but for buffers of other ranks than the first.
inline Role role_of(const std::string& text) {
  return text == "master"   ? Role::master()
         : text == "param"  ? Role::param()
         : text == "buffer" ? Role::buffer()
                            : Role::moment(text);
}

/// Elements [begin, end) of the flattened tensor.
inline Piece range_piece(const std::string& name, const std::string& role, const Shape& shape, int64_t begin,
                         int64_t end, const PieceData& data) {
  return {name, role_of(role), shape, Region::range(begin, end), data};
}

inline Piece whole(const std::string& name, const std::string& role, const at::Tensor& data) {
  return range_piece(name, role, {data.numel()}, 0, data.numel(), data);
}

/// Quick, for thousands of them: no fsync, and a new file, since ext4 flushes one that was truncated.
inline void overwrite(const std::string& path, const std::string& bytes) {
  remove_quietly(path);
  File::create(path).write_at(bytes.data(), static_cast<int64_t>(bytes.size()), 0);
}

/// The rank's place on a mesh whose only axis is "data".
inline Coordinates on_data_axis(int rank) { return Coordinates({{"data", rank}}); }

// A save with one nonce for all, which is right unless saves of one tag meet.
constexpr uint64_t kNonce = 0xfeed;
inline void write_rank(const std::string& directory, const std::string& tag, int rank, const std::vector<Piece>& pieces,
                       const std::string& state_json) {
  write_rank({directory, tag, kNonce}, {rank, {on_data_axis(rank), state_json}, pieces});
}
inline std::string commit(const std::string& directory, const std::string& tag, const Manifest& manifest,
                          bool save_latest) {
  return commit(SaveTarget{directory, tag, kNonce}, manifest, save_latest);
}
inline void abandon(const std::string& directory, const std::string& tag) { abandon({directory, tag, kNonce}); }
inline std::string growing(const std::string& directory, const std::string& tag) {
  return directory + "/" + tag + "." + nonce_text(kNonce) + ".tmp";
}

/// A save by a world of one.
inline void save(const std::string& directory, const std::string& tag, const std::vector<Piece>& pieces,
                 const Manifest& manifest = {}) {
  write_rank(directory, tag, 0, pieces, "{}");
  commit(directory, tag, manifest, true);
}

/// Bit for bit, so that NaN equals itself and -0 differs from 0.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

/// The text of the CheckpointError that `call` throws; a failed test and "" when it throws none.
template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const CheckpointError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no CheckpointError was thrown";
  return "";
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace deeptide::checkpoint
