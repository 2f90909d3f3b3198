// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Encodes what travels in place of a tensor's elements, and carries it by collectives.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "comm/group.h"
#include "device/memory/memory.h"

namespace deeptide::comm {

/// Turns elements into a message of bytes and back. Shapes below: values (N,); message (bytes(values),) uint8, or more.
class Codec {
 public:
  virtual ~Codec() = default;
  /// The bytes that a message of these values takes.
  virtual int64_t bytes(const at::Tensor& values) const = 0;
  /// Elements that the message leaves out may remain in `values`.
  virtual void encode(const at::Tensor& values, const at::Tensor& message) const = 0;
  virtual void decode(const at::Tensor& message, const at::Tensor& values) const = 0;
};

/// The functions below give what Group's collectives of their name give, if the codec loses nothing. Ranks first tell
/// each other how many bytes they need; all messages take as many as the longest. Where that is no fewer than the whole
/// tensor's, all ranks send whole tensors. Collective; return when all is there. CPU only. `messages`: where their
/// memory comes from. Errors: as Group::wait.

/// Shapes: (W * N,) both.
void all_to_all_coded(Group& group, const Codec& codec, const at::Tensor& output, const at::Tensor& input,
                      device::BufferPool& messages, const Site& site);
/// Shapes: input (N,), output (W * N,).
void all_gather_coded(Group& group, const Codec& codec, const at::Tensor& output, const at::Tensor& input,
                      device::BufferPool& messages, const Site& site);

}  // namespace deeptide::comm
