// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The part of a stepper between backward and step: shows gradients to the program, drops them, brings them back.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <span>

#include "base/libraries/format.h"
#include "base/log.h"
#include "engine/step/stepper.h"

namespace deeptide::engine {

using comm::Call;
using comm::Close;

bool Stepper::keeps_always() const { return parts_.kept != nullptr && parts_.config.runtime().keep_grad; }

void Stepper::meet_backward() {
  if (parts_.kept) parts_.kept->take_back();
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == awaited_task_) return;
  awaited_task_ = task;
  torch::autograd::Engine::get_default_engine().queue_callback([this, alive = std::weak_ptr<bool>(alive_)] {
    if (!alive.expired()) end_backward();
  });
}

/// Autograd ends. After a backward of the program's own, it shows gradients here; the engine's own shows them itself.
void Stepper::end_backward() {
  if (keeps_always() && is_boundary() && !parts_.intake->is_in_backward()) return show_gradients();
  parts_.reducer->end_backward();
}

void Stepper::show_gradients() {
  const auto closes = parts_.boundary.enter(Call::show_gradients, [&](Close& own) {
    if (parts_.kept) parts_.kept->take_back();
    own.rounds = parts_.reducer->rounds_begun();  // in case of a failure
    own.rounds = parts_.reducer->rounds_wanted_with(parts_.intake->check_left());
  });
  show(closes);
}

/// Every rank calls it, also one that entered step() meanwhile.
void Stepper::show(const std::vector<Close>& closes) {
  if (parts_.kept == nullptr) {
    parts_.kept = make_kept_();
    parts_.kept->set_loss_scale(loss_scale());
  }
  parts_.kept->take_back();
  parts_.intake->take_left();
  parts_.reducer->finish(most_rounds(closes), /*ends_micro_batch=*/false);
  parts_.kept->agree(parts_.boundary);
  parts_.kept->show(parts_.boundary);
  parts_.intake->passes().forget();  // the program may see what is in them
}

void Stepper::zero_grad() {
  losses_.clear();
  if (!parts_.reducer) return;
  parts_.intake->passes().forget();
  const auto closes = parts_.boundary.enter(Call::zero_grad, [&](Close& own) {
    if (parts_.kept) parts_.kept->forget();
    parts_.intake->drop_left();
    own.rounds = parts_.reducer->rounds_begun();
  });
  parts_.reducer->discard(most_rounds(closes));
}

void Stepper::drop_gradients(const std::vector<at::Tensor>& of) {
  std::vector<uint8_t> marks;
  const auto closes = parts_.boundary.enter(Call::drop_gradients, [&](Close& own) {
    if (parts_.kept) parts_.kept->take_back();
    marks = parts_.intake->drop(of);
    own.rounds = parts_.reducer->rounds_begun();
  });
  drop(closes, std::move(marks));
}

/// `marks`: as GradientIntake::drop returns them; empty on a rank that has joined.
void Stepper::drop(const std::vector<Close>& closes, std::vector<uint8_t> marks) {
  marks.resize(parts_.reducer->seen().size(), 0);
  const auto all = parts_.boundary.exchange_all(std::span<const uint8_t>(marks), {"zero_grad", "comparing parameters"});
  std::optional<size_t> first;  // rank that has not joined
  for (size_t rank = 0; rank < closes.size(); ++rank) {
    if (closes[rank].joined) continue;
    if (!first) first = rank;
    const auto begin = all.begin() + static_cast<ptrdiff_t>(rank * marks.size());
    const auto leader = all.begin() + static_cast<ptrdiff_t>(*first * marks.size());
    TORCH_CHECK_VALUE(std::equal(begin, begin + static_cast<ptrdiff_t>(marks.size()), leader),
                      "zero_grad(), or p.grad = None, dropped gradients of other parameters on ",
                      parts_.channels.mesh().name(parts_.channels.data().ranks()[*first]), " than on ",
                      parts_.channels.mesh().name(parts_.channels.data().ranks()[rank]),
                      ": gradients are summed over the ranks, so drop the same on every rank");
    std::copy(leader, leader + static_cast<ptrdiff_t>(marks.size()), marks.begin());
  }
  parts_.reducer->finish(most_rounds(closes), /*ends_micro_batch=*/false);
  if (!parts_.reducer->has_gradient()) return;
  size_t next = 0;
  const auto trainable = parts_.model.trainable();
  for (size_t unit = 0; unit < trainable.size(); ++unit) {
    for (size_t p = 0; p < trainable[unit]->parameters().size(); ++p) {
      if (marks[next++] != 0) parts_.reducer->drop_gradient(static_cast<int>(unit), static_cast<int>(p));
    }
  }
}

/// Takes part in what the leading rank called other than step().
void Stepper::follow(const std::vector<Close>& closes) {
  const Call call = call_of(closes);
  if (call == Call::zero_grad) return parts_.reducer->discard(most_rounds(closes));
  if (call == Call::drop_gradients) return drop(closes, {});
  show(closes);
}

/// Brings what lies in `.grad` into the reducer.
void Stepper::take_gradients() {
  if (parts_.kept && (keeps_always() || parts_.kept->were_shown())) {
    parts_.kept->agree(parts_.boundary);
    parts_.kept->absorb();
    parts_.kept->forget();
  }
  parts_.intake->take_left();
}

void Stepper::say_mixture() {
  const std::string name = parts_.intake->take_mixture();
  if (name.empty() || !parts_.channels.is_first()) return;
  log(LogLevel::warning,
      format_text("step {}: '{}' has gradients of a backward pass that this engine did not begin (loss.backward(), or "
                  "another engine's) beside those of engine.backward(), and they add up. If they are not meant, drop "
                  "them before engine.backward(), on all ranks: model.zero_grad(), or engine.zero_grad()",
                  parts_.progress.global_steps + 1, name));
}

}  // namespace deeptide::engine
