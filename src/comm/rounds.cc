// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs each round as one small all-gather, or as none; they end in the order in which they began.
#include "comm/rounds.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <variant>

#include "base/invariant.h"
#include "deeptide/errors.h"

namespace deeptide::comm {

static_assert(std::is_trivially_copyable_v<Word>);

namespace {

constexpr std::chrono::milliseconds kPeriod{250};

at::Tensor bytes_of(size_t count) { return at::empty({static_cast<int64_t>(count)}, at::kByte); }

}  // namespace

Rounds::Rounds(Group& control) : control_(control) {}

bool Rounds::posted() const {
  const std::lock_guard lock(mutex_);
  return !posted_.empty();
}

bool Rounds::ready() const {
  const std::lock_guard lock(mutex_);
  return !posted_.empty() && (posted_.front().is_own || posted_.front().pending.ready());
}

void Rounds::post(Word word) {
  const std::lock_guard lock(mutex_);
  DEEPTIDE_INVARIANT(posted_.empty(), "a round is already under way");
  start(word);
}

void Rounds::post_behind(Word word) {
  const std::lock_guard lock(mutex_);
  start(word);
}

void Rounds::start(Word word) {
  // Told or not, it holds until this word: a rank that closes waits for no reduction, and the next pass counts anew.
  const int64_t announced = announced_.exchange(0);
  if (auto* wishes = std::get_if<Wishes>(&word)) wishes->rounds = static_cast<int32_t>(announced);
  std::visit([&](auto& message) { message.launched = launched_; }, word);
  Round& round = posted_.emplace_back(std::exchange(spare_, {}));
  if (!round.in.defined()) {
    round = {.out = bytes_of(sizeof(Word) * static_cast<size_t>(size())), .in = bytes_of(sizeof(Word))};
  }
  round.is_own = alike_ && std::holds_alternative<Wishes>(word);
  if (round.is_own) {
    for (int rank = 0; rank < size(); ++rank) {
      std::memcpy(static_cast<char*>(round.out.mutable_data_ptr()) + sizeof(Word) * rank, &word, sizeof(Word));
    }
    return;
  }
  std::memcpy(round.in.mutable_data_ptr(), &word, sizeof(Word));
  round.pending = control_.all_gather(round.out, round.in);
}

std::optional<std::vector<Word>> Rounds::collect_for(std::chrono::milliseconds limit, const Site& site) {
  const std::lock_guard lock(mutex_);
  DEEPTIDE_INVARIANT(!posted_.empty(), "no round is under way");
  if (!posted_.front().is_own) {
    if (!wait_) wait_.emplace(control_, posted_.front().pending, site);
    if (!wait_->go_on(limit)) return std::nullopt;
    wait_.reset();
  }
  spare_ = std::move(posted_.front());
  posted_.pop_front();
  ++count_;
  return words(spare_);
}

std::vector<Word> Rounds::words(const Round& round) {
  std::vector<Word> words(static_cast<size_t>(control_.size()));
  std::memcpy(static_cast<void*>(words.data()), round.out.const_data_ptr(), words.size() * sizeof(Word));
  int64_t announced = 0, launched = INT64_MAX;
  for (const Word& word : words) {
    if (const auto* wishes = std::get_if<Wishes>(&word)) announced = std::max<int64_t>(announced, wishes->rounds);
    launched = std::min(launched, std::visit([](const auto& message) { return message.launched; }, word));
  }
  most_announced_ = announced;
  launched_by_all_ = launched;
  return words;
}

std::vector<Word> Rounds::collect(const Site& site) {
  for (;;) {
    if (auto words = collect_for(kPeriod, site)) return *std::move(words);
  }
}

void Rounds::exchange_bytes(const void* own, void* all, size_t bytes, const Site& site) {
  if (bytes == 0) return;  // on all ranks: there may be no memory to copy from
  const std::lock_guard lock(mutex_);
  DEEPTIDE_INVARIANT(posted_.empty(), "a round is already under way");
  if (!left_.empty()) {
    throw CommError("this rank stopped waiting while it was " + left_ +
                    ", and would take the others' next message for their answer; end the process and resume from the "
                    "last checkpoint, which is as it was");
  }
  const at::Tensor in = bytes_of(bytes), out = bytes_of(bytes * static_cast<size_t>(control_.size()));
  std::memcpy(in.mutable_data_ptr(), own, bytes);
  Pending pending = control_.all_gather(out, in);
  left_ = site.what;
  control_.wait(pending, site);
  left_.clear();
  ++count_;
  std::memcpy(all, out.const_data_ptr(), out.nbytes());
}

}  // namespace deeptide::comm
