// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs each control round as one small all-gather.
#include "comm/rendezvous.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "base/invariant.h"

namespace deeptide::comm {

static_assert(std::is_trivially_copyable_v<Word>);

namespace {

at::Tensor bytes_of(size_t count) { return at::empty({static_cast<int64_t>(count)}, at::kByte); }

}  // namespace

Rendezvous::Rendezvous(Group& control)
    : control_(control),
      out_(bytes_of(sizeof(Word) * static_cast<size_t>(control.size()))),
      in_(bytes_of(sizeof(Word))) {}

void Rendezvous::post(const Word& word) {
  DEEPTIDE_INVARIANT(!posted_, "a round is already under way");
  std::memcpy(in_.mutable_data_ptr(), &word, sizeof(Word));
  pending_ = control_.all_gather(out_, in_);
  posted_ = true;
}

std::vector<Word> Rendezvous::collect(const Site& site, const std::function<void()>& meanwhile) {
  DEEPTIDE_INVARIANT(posted_, "no round is under way");
  control_.wait(pending_, site, meanwhile);
  posted_ = false;
  ++rounds_;
  std::vector<Word> words(control_.size());
  std::memcpy(static_cast<void*>(words.data()), out_.const_data_ptr(), words.size() * sizeof(Word));
  return words;
}

void Rendezvous::exchange_bytes(const void* own, void* all, size_t bytes, const Site& site) {
  DEEPTIDE_INVARIANT(!posted_, "a round is already under way");
  const at::Tensor in = bytes_of(bytes), out = bytes_of(bytes * static_cast<size_t>(control_.size()));
  std::memcpy(in.mutable_data_ptr(), own, bytes);
  Pending pending = control_.all_gather(out, in);
  control_.wait(pending, site);
  ++rounds_;
  std::memcpy(all, out.const_data_ptr(), out.nbytes());
}

}  // namespace deeptide::comm
