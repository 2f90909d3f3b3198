// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Packs blocks behind a bitmap.
#include "comm/codecs/nonzero_codec.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace deeptide::comm {

using at::Tensor;

namespace {

constexpr int64_t kAlign = device::kAlignmentBytes;
constexpr int64_t kMostItemBytes = 16;

/// The blocks of a tensor: `numel` elements of `item` bytes.
struct Blocks {
  explicit Blocks(const Tensor& values) : numel(values.numel()), item(values.element_size()) {}

  int64_t count() const { return (numel + NonzeroCodec::kBlock - 1) / NonzeroCodec::kBlock; }
  int64_t stride() const { return NonzeroCodec::kBlock * item; }
  int64_t bytes_of(int64_t block) const {
    return std::min(stride(), (numel - block * NonzeroCodec::kBlock) * item);  // the last may be short
  }
  int64_t bitmap_bytes() const { return ((count() + 7) / 8 + kAlign - 1) / kAlign * kAlign; }

  int64_t numel, item;
};

bool is_zero(const char* data, int64_t bytes) {
  static constexpr std::array<char, NonzeroCodec::kBlock * kMostItemBytes> kZeros{};
  return std::memcmp(data, kZeros.data(), static_cast<size_t>(bytes)) == 0;
}

}  // namespace

int64_t NonzeroCodec::bytes(const Tensor& values) const {
  const Blocks blocks(values);
  const auto* data = static_cast<const char*>(values.const_data_ptr());
  int64_t bytes = blocks.bitmap_bytes();
  for (int64_t block = 0; block < blocks.count(); ++block) {
    if (!is_zero(data + block * blocks.stride(), blocks.bytes_of(block))) bytes += blocks.stride();
  }
  return bytes;
}

void NonzeroCodec::encode(const Tensor& values, const Tensor& message) const {
  const Blocks blocks(values);
  const auto* data = static_cast<const char*>(values.const_data_ptr());
  auto* bitmap = message.mutable_data_ptr<uint8_t>();
  uint8_t* to = bitmap + blocks.bitmap_bytes();
  std::memset(bitmap, 0, static_cast<size_t>(blocks.bitmap_bytes()));
  for (int64_t block = 0; block < blocks.count(); ++block) {
    const char* from = data + block * blocks.stride();
    const int64_t bytes = blocks.bytes_of(block);
    if (is_zero(from, bytes)) continue;
    bitmap[block / 8] = static_cast<uint8_t>(bitmap[block / 8] | (1U << (block % 8)));
    std::memcpy(to, from, static_cast<size_t>(bytes));
    to += blocks.stride();
  }
}

void NonzeroCodec::decode(const Tensor& message, const Tensor& values) const {
  const Blocks blocks(values);
  auto* data = static_cast<char*>(values.mutable_data_ptr());
  const auto* bitmap = message.const_data_ptr<uint8_t>();
  const uint8_t* from = bitmap + blocks.bitmap_bytes();
  for (int64_t block = 0; block < blocks.count(); ++block) {
    char* to = data + block * blocks.stride();
    const auto bytes = static_cast<size_t>(blocks.bytes_of(block));
    if (((bitmap[block / 8] >> (block % 8)) & 1U) == 0) {
      std::memset(to, 0, bytes);
    } else {
      std::memcpy(to, from, bytes);
      from += blocks.stride();
    }
  }
}

}  // namespace deeptide::comm
