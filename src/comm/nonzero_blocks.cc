// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Packs blocks behind a bitmap. Bits decide, so that a negative zero travels.
#include "comm/nonzero_blocks.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace deeptide::comm {

using at::Tensor;

namespace {

constexpr int64_t kAlign = device::kAlignmentBytes;

/// A part of a tensor that one rank sends to another: `numel` elements of `item` bytes.
struct Part {
  int64_t numel;
  int64_t item;

  int64_t num_blocks() const { return (numel + kNonzeroBlock - 1) / kNonzeroBlock; }
  int64_t block_bytes() const { return kNonzeroBlock * item; }
  int64_t bytes_of(int64_t block) const {
    return std::min(block_bytes(), (numel - block * kNonzeroBlock) * item);  // the last may be short
  }
  int64_t bitmap_bytes() const { return ((num_blocks() + 7) / 8 + kAlign - 1) / kAlign * kAlign; }
  int64_t message_bytes(int64_t blocks) const { return bitmap_bytes() + blocks * block_bytes(); }
};

bool is_zero(const char* data, int64_t bytes) {
  static constexpr std::array<char, kNonzeroBlock * sizeof(double)> kZeros{};
  return std::memcmp(data, kZeros.data(), static_cast<size_t>(bytes)) == 0;
}

int64_t count_nonzero(const Part& part, const char* data) {
  int64_t count = 0;
  for (int64_t block = 0; block < part.num_blocks(); ++block) {
    if (!is_zero(data + block * part.block_bytes(), part.bytes_of(block))) ++count;
  }
  return count;
}

void pack(const Part& part, const char* data, char* message) {
  auto* bitmap = reinterpret_cast<uint8_t*>(message);
  char* to = message + part.bitmap_bytes();
  std::memset(bitmap, 0, static_cast<size_t>(part.bitmap_bytes()));
  for (int64_t block = 0; block < part.num_blocks(); ++block) {
    const char* from = data + block * part.block_bytes();
    const int64_t bytes = part.bytes_of(block);
    if (is_zero(from, bytes)) continue;
    bitmap[block / 8] = static_cast<uint8_t>(bitmap[block / 8] | (1U << (block % 8)));
    std::memcpy(to, from, static_cast<size_t>(bytes));
    to += part.block_bytes();
  }
}

void unpack(const Part& part, const char* message, char* data) {
  const auto* bitmap = reinterpret_cast<const uint8_t*>(message);
  const char* from = message + part.bitmap_bytes();
  for (int64_t block = 0; block < part.num_blocks(); ++block) {
    char* to = data + block * part.block_bytes();
    const auto bytes = static_cast<size_t>(part.bytes_of(block));
    if (((bitmap[block / 8] >> (block % 8)) & 1U) == 0) {
      std::memset(to, 0, bytes);
    } else {
      std::memcpy(to, from, bytes);
      from += part.block_bytes();
    }
  }
}

/// The most blocks of any part of any rank. Collective.
int64_t most_blocks(Group& group, const std::vector<int64_t>& own, const Site& site) {
  const int64_t mine = *std::max_element(own.begin(), own.end());
  const Tensor sent = at::empty({1}, at::kLong), all = at::empty({group.size()}, at::kLong);
  *sent.mutable_data_ptr<int64_t>() = mine;
  auto pending = group.all_gather(all, sent);
  group.wait(pending, site);
  const int64_t* counts = all.const_data_ptr<int64_t>();
  return *std::max_element(counts, counts + group.size());
}

/// Sends the `num_parts` parts of `input` by `collective`, which returns one part of each rank in `output`.
template <typename Collective>
void exchange(Group& group, const Tensor& output, const Tensor& input, int64_t num_parts, device::BufferPool& messages,
              const Site& site, const Collective& collective) {
  const Part part{input.numel() / num_parts, input.element_size()};
  const int64_t stride = part.numel * part.item;
  const auto* from = static_cast<const char*>(input.const_data_ptr());
  std::vector<int64_t> counts;
  for (int64_t i = 0; i < num_parts; ++i) counts.push_back(count_nonzero(part, from + i * stride));
  const int64_t bytes = part.message_bytes(most_blocks(group, counts, site));
  if (bytes >= stride) {
    auto pending = collective(output, input);
    return group.wait(pending, site);
  }
  Tensor sent = messages.take(num_parts * bytes, at::kByte), received = messages.take(group.size() * bytes, at::kByte);
  auto* outgoing = static_cast<char*>(sent.mutable_data_ptr());
  for (int64_t i = 0; i < num_parts; ++i) pack(part, from + i * stride, outgoing + i * bytes);
  auto pending = collective(received, sent);
  group.wait(pending, site);
  const auto* incoming = static_cast<const char*>(received.const_data_ptr());
  auto* to = static_cast<char*>(output.mutable_data_ptr());
  for (int64_t rank = 0; rank < group.size(); ++rank) unpack(part, incoming + rank * bytes, to + rank * stride);
  messages.put(std::move(sent));
  messages.put(std::move(received));
}

}  // namespace

void all_to_all_nonzero(Group& group, const Tensor& output, const Tensor& input, device::BufferPool& messages,
                        const Site& site) {
  const auto all_to_all = [&](const Tensor& to, const Tensor& from) { return group.all_to_all(to, from); };
  exchange(group, output, input, group.size(), messages, site, all_to_all);
}

void all_gather_nonzero(Group& group, const Tensor& output, const Tensor& input, device::BufferPool& messages,
                        const Site& site) {
  const auto all_gather = [&](const Tensor& to, const Tensor& from) { return group.all_gather(to, from); };
  exchange(group, output, input, /*num_parts=*/1, messages, site, all_gather);
}

}  // namespace deeptide::comm
