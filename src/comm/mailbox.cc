// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Sends what tells of a tensor ahead of it, and asks for one tensor's bytes after the other's.
#include "comm/mailbox.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>
#include <utility>

#include "comm/blocking.h"

namespace deeptide::comm {

using at::Tensor;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

/// Describes a tensor: a mark, its type, its dimensions and their sizes.
struct Label {
  static constexpr int64_t kMark = 0x6c6162656c;

  int64_t mark = kMark;
  int64_t dtype = 0;
  int64_t num_dims = 0;
  std::array<int64_t, Mailbox::kMostDims> sizes{};

  bool makes_sense() const {
    return mark == kMark && dtype >= 0 && dtype < static_cast<int64_t>(at::ScalarType::NumOptions) && num_dims >= 0 &&
           num_dims <= Mailbox::kMostDims && std::all_of(sizes.begin(), sizes.end(), [](int64_t n) { return n >= 0; });
  }
  at::IntArrayRef shape() const { return {sizes.data(), static_cast<size_t>(num_dims)}; }
};

Tensor empty_label() { return at::empty({static_cast<int64_t>(sizeof(Label))}, at::kByte); }

Tensor label_of(const Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.dim() <= Mailbox::kMostDims, "deeptide: a tensor of ", tensor.dim(),
                    " dimensions is sent to a rank that does not know its shape, expected at most ", Mailbox::kMostDims,
                    "; reshape it");
  Label label{.dtype = static_cast<int64_t>(tensor.scalar_type()), .num_dims = tensor.dim()};
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), label.sizes.begin());
  Tensor bytes = empty_label();
  std::memcpy(bytes.mutable_data_ptr(), &label, sizeof(Label));
  return bytes;
}

/// While bytes of both directions pass through the callers' hands, a rank that waits for one looks after the other: at
/// once while they flow, then ever more rarely, so as to leave its core to others.
class Turns {
 public:
  milliseconds next() {
    if (++turns_ <= kBusy) {
      std::this_thread::yield();
      return milliseconds(0);
    }
    return milliseconds(1);
  }
  void begin_anew() { turns_ = 0; }

 private:
  static constexpr int kBusy = 200;
  int turns_ = 0;
};

constexpr milliseconds kBetweenServices{5}, kLongTurn{250};

}  // namespace

struct Mailbox::Letter::State {
  int from = 0;
  Tensor tensor;  // undefined: told, and not known yet
  Tensor label;   // on its way or there; undefined: known
  Pending pending;
  bool is_asked_for = false;  // its bytes
};

void Mailbox::send_told(const Tensor& tensor, int to) {
  post(label_of(tensor).to(device_), to);
  post(tensor, to);
}

void Mailbox::post(const Tensor& tensor, int to) {
  TORCH_CHECK_VALUE(to != peers_.index() && to >= 0 && to < peers_.size(), "deeptide: rank ", peers_.index(),
                    " of a team of ", peers_.size(), " sends to rank ", to);
  Pending pending = peers_.send(tensor.contiguous(), to);
  if (pending.valid()) sends_.push_back(std::move(pending));
}

Mailbox::Letter Mailbox::add(int from, Tensor tensor) {
  TORCH_CHECK_VALUE(from != peers_.index() && from >= 0 && from < peers_.size(), "deeptide: rank ", peers_.index(),
                    " of a team of ", peers_.size(), " receives from rank ", from);
  Letter letter;
  letter.state_ = std::make_shared<Letter::State>();
  letter.state_->from = from;
  letter.state_->tensor = std::move(tensor);
  from_[static_cast<size_t>(from)].push_back(letter.state_);
  start_due(from);
  return letter;
}

/// Asks for the bytes of the letters whose turn it is. A letter's turn comes when those of all before it have been
/// asked for.
void Mailbox::start_due(int from) {
  auto& queue = from_[static_cast<size_t>(from)];
  while (!queue.empty()) {
    Letter::State& first = *queue.front();
    if (!first.tensor.defined() && !first.label.defined()) {
      first.label = empty_label().to(device_);
      first.pending = peers_.receive(first.label, from);
    }
    if (!first.tensor.defined()) {
      if (first.pending.valid()) return;  // the label has not come
      const Tensor bytes = first.label.cpu();
      Label label;
      std::memcpy(&label, bytes.const_data_ptr(), sizeof(Label));
      if (!label.makes_sense()) {
        throw_comm_error(peers_.name_of(peers_.team().rank()) + " received from " +
                         peers_.name_of(peers_.team().ranks()[static_cast<size_t>(from)]) +
                         " what does not tell of a tensor: the ranks' sends and receives differ; a tensor that is sent "
                         "with its shape must be received so");
      }
      const auto dtype = static_cast<at::ScalarType>(label.dtype);
      first.tensor = at::empty(label.shape(), at::TensorOptions().dtype(dtype).device(device_));
    }
    first.pending = peers_.receive(first.tensor, from);
    first.is_asked_for = true;
    queue.pop_front();
  }
}

/// The letter that a wait for `letter` waits for first.
Mailbox::StatePtr Mailbox::current(const Letter& letter) const {
  return letter.state_->is_asked_for ? letter.state_ : from_[static_cast<size_t>(letter.state_->from)].front();
}

void Mailbox::end_sends(const Site& site) {
  for (size_t i = 0; i < sends_.size();) {
    if (sends_[i].ready() && peers_.wait_for(sends_[i], milliseconds(0), site)) {
      sends_.erase(sends_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

void Mailbox::go_on(const Site& site) {
  end_sends(site);
  for (size_t from = 0; from < from_.size(); ++from) {
    if (from_[from].empty()) continue;
    Pending& label = from_[from].front()->pending;
    if (label.ready() && peers_.wait_for(label, milliseconds(0), site)) start_due(static_cast<int>(from));
  }
}

bool Mailbox::wait_for(Letter& letter, milliseconds limit, const Site& site) {
  const auto end = steady_clock::now() + limit;
  for (;;) {
    go_on(site);
    const StatePtr first = current(letter);
    const auto left = std::chrono::ceil<milliseconds>(end - steady_clock::now());
    if (!peers_.wait_for(first->pending, std::clamp(left, milliseconds(0), milliseconds(1)), site)) {
      if (steady_clock::now() >= end) return false;
      continue;
    }
    if (first == letter.state_ && first->is_asked_for) return true;
    start_due(first->from);
  }
}

/// Waits like Group::wait, but moves what this rank sends meanwhile.
void Mailbox::wait(Pending& pending, std::optional<int> from, const Site& site,
                   const std::function<void()>& meanwhile) {
  Wait waiting(peers_, pending, site, from);
  Turns turns;
  auto due = steady_clock::now();
  for (;;) {
    if (meanwhile && steady_clock::now() >= due) {
      meanwhile();
      due = steady_clock::now() + kBetweenServices;
    }
    const size_t before = sends_.size();
    end_sends(site);
    if (sends_.size() != before) turns.begin_anew();
    const bool moves = !sends_.empty() && !peers_.advances_alone();
    if (waiting.go_on(moves ? turns.next() : meanwhile ? kBetweenServices : kLongTurn)) return;
  }
}

Tensor Mailbox::wait(Letter letter, const Site& site, const std::function<void()>& meanwhile) {
  for (;;) {
    const StatePtr first = current(letter);
    wait(first->pending, first->from, site, meanwhile);
    if (first == letter.state_ && first->is_asked_for) return first->tensor;
    start_due(first->from);
  }
}

void Mailbox::flush(const Site& site, const std::function<void()>& meanwhile) {
  while (!sends_.empty()) {
    Pending first = std::move(sends_.front());
    sends_.pop_front();
    wait(first, {}, site, meanwhile);
  }
}

}  // namespace deeptide::comm
