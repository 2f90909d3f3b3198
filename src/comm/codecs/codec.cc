// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Agrees on the length of messages, then exchanges them.
#include "comm/codecs/codec.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace deeptide::comm {

using at::Tensor;

namespace {

/// The most bytes that any rank needs. Collective.
int64_t longest(Group& group, int64_t own, const Site& site) {
  const Tensor sent = at::empty({1}, at::kLong), all = at::empty({group.size()}, at::kLong);
  *sent.mutable_data_ptr<int64_t>() = own;
  auto pending = group.all_gather(all, sent);
  group.wait(pending, site);
  const int64_t* bytes = all.const_data_ptr<int64_t>();
  return *std::max_element(bytes, bytes + group.size());
}

/// Sends the `num_parts` parts of `input` by `collective`, which returns one part of each rank in `output`.
template <typename Collective>
void exchange(Group& group, const Codec& codec, const Tensor& output, const Tensor& input, int64_t num_parts,
              device::BufferPool& messages, const Site& site, const Collective& collective) {
  const int64_t numel = input.numel() / num_parts;
  int64_t own = 0;
  for (int64_t i = 0; i < num_parts; ++i) own = std::max(own, codec.bytes(input.narrow(0, i * numel, numel)));
  const int64_t bytes = longest(group, own, site);
  if (bytes >= numel * input.element_size()) {
    auto pending = collective(output, input);
    return group.wait(pending, site);
  }
  Tensor sent = messages.take(num_parts * bytes, at::kByte), received = messages.take(group.size() * bytes, at::kByte);
  for (int64_t i = 0; i < num_parts; ++i) {
    codec.encode(input.narrow(0, i * numel, numel), sent.narrow(0, i * bytes, bytes));
  }
  auto pending = collective(received, sent);
  group.wait(pending, site);
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    codec.decode(received.narrow(0, rank * bytes, bytes), output.narrow(0, rank * numel, numel));
  }
  messages.put(std::move(sent));
  messages.put(std::move(received));
}

}  // namespace

void all_to_all_coded(Group& group, const Codec& codec, const Tensor& output, const Tensor& input,
                      device::BufferPool& messages, const Site& site) {
  const auto all_to_all = [&](const Tensor& to, const Tensor& from) { return group.all_to_all(to, from); };
  exchange(group, codec, output, input, group.size(), messages, site, all_to_all);
}

void all_gather_coded(Group& group, const Codec& codec, const Tensor& output, const Tensor& input,
                      device::BufferPool& messages, const Site& site) {
  const auto all_gather = [&](const Tensor& to, const Tensor& from) { return group.all_gather(to, from); };
  exchange(group, codec, output, input, /*num_parts=*/1, messages, site, all_gather);
}

}  // namespace deeptide::comm
