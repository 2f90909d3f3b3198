// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Control rounds as one small all-gather each.
#include "comm/rendezvous.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstring>

namespace deeptide::comm {

static_assert(sizeof(Message) % 8 == 0);

Rendezvous::Rendezvous(Group& control)
    : control_(control),
      out_(at::empty({static_cast<int64_t>(sizeof(Message)) * control.size()}, at::kByte)),
      in_(at::empty({static_cast<int64_t>(sizeof(Message))}, at::kByte)) {}

void Rendezvous::post(const Message& message) {
  TORCH_INTERNAL_ASSERT(!posted_, "a round is under way already");
  std::memcpy(in_.mutable_data_ptr(), &message, sizeof(Message));
  pending_ = control_.all_gather(out_, in_);
  posted_ = true;
}

std::vector<Message> Rendezvous::collect(const Site& site) {
  TORCH_INTERNAL_ASSERT(posted_, "no round is under way");
  control_.wait(pending_, site);
  posted_ = false;
  ++rounds_;
  std::vector<Message> messages(control_.size());
  std::memcpy(messages.data(), out_.const_data_ptr(), messages.size() * sizeof(Message));
  return messages;
}

}  // namespace deeptide::comm
