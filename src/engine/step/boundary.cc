// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs one closing round, then checks that all ranks called one method.
#include "engine/step/boundary.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>

#include "base/interrupt.h"
#include "deeptide/engine.h"
#include "engine/run/preemption.h"
#include "engine/step/across_stages.h"
#include "engine/step/saver.h"

namespace deeptide::engine {

using comm::Call;
using comm::Close;

namespace {

constexpr std::chrono::milliseconds kPeriod{250};
constexpr std::chrono::milliseconds kTurn{5};
/// A rank that is ahead waits for a moment now and then, and may yet refuse the step; this one then has taken nothing.
constexpr std::chrono::seconds kTakesEarlyAfter{2};

/// Whether ranks save in handlers of an exception while others are in step() yet.
bool is_save_in_handlers(const std::vector<Close>& closes) {
  const auto saves = [](const Close& close) { return close.call == Call::save_checkpoint && close.in_handler; };
  const auto steps = [](const Close& close) { return close.call == Call::step; };
  return std::any_of(closes.begin(), closes.end(), saves) && std::any_of(closes.begin(), closes.end(), steps) &&
         std::all_of(closes.begin(), closes.end(), [&](const Close& close) { return saves(close) || steps(close); });
}

}  // namespace

const char* call_name(Call call) {
  static constexpr const char* kNames[] = {"step()",
                                           "save_checkpoint()",
                                           "load_checkpoint()",
                                           "module_state_dict(), full_state() or the like",
                                           "empty_partition_cache()",
                                           "zero_grad()",
                                           "backward() with keep_grad",
                                           "rebuild()",
                                           "offload_states() or reload_states()",
                                           "wait_for_save()",
                                           "preempt()",
                                           "zero_grad() of a module, or p.grad = None, after backward()"};
  return kNames[static_cast<int32_t>(call)];
}

int64_t most_rounds(const std::vector<Close>& closes) {
  int64_t rounds = 0;
  for (const Close& close : closes) rounds = std::max(rounds, close.rounds);
  return rounds;
}

const Close& leading(const std::vector<Close>& closes) {
  const auto found = std::find_if(closes.begin(), closes.end(), [](const Close& close) { return !close.joined; });
  return found == closes.end() ? closes.front() : *found;
}

Call call_of(const std::vector<Close>& closes) {
  for (const Call call : {Call::preempt, Call::show_gradients}) {
    if (std::any_of(closes.begin(), closes.end(), [&](const Close& close) { return close.call == call; })) return call;
  }
  return leading(closes).call;
}

std::vector<Close> Boundary::enter(Call call, const std::function<void(Close&)>& prepare) {
  refuse_in_interrupt_handler(call_name(call));
  // Programs drop gradients right after a step: that needs no parameter.
  if (arrivals_ && call != Call::zero_grad) arrivals_->wait_all();
  Close own{.call = call};
  if (saver_) own.save = static_cast<int32_t>(saver_->phase());
  if (preemption_) own.asked_to_go = preemption_->is_asked();
  std::exception_ptr failure;
  try {
    model_.check_bound(/*may_resize=*/call == Call::rebuild);
    if (!refusal_.empty() && (call == Call::step || call == Call::save_checkpoint)) throw CheckpointError(refusal_);
    if (prepare) prepare(own);
    own.has_written = has_private_writes();
  } catch (...) {
    failure = std::current_exception();
    own.failed = true;
  }
  const bool ends_pass = call != Call::zero_grad && call != Call::drop_gradients && call != Call::show_gradients;
  auto closes = close(own, ends_pass);
  // Those in step() throw, and come here too if they were interrupted; else the board tells that they do not.
  while (is_save_in_handlers(closes) && call == Call::save_checkpoint) closes = close(own, ends_pass);
  if (is_save_in_handlers(closes)) refuse_step(closes);
  check_calls(closes);
  check_failures(closes, failure);
  take_private_writes(closes);
  model_.note_external_writes();
  if (std::any_of(closes.begin(), closes.end(), [](const Close& close) { return close.asked_to_go; })) {
    preemption_->agree();
  }
  if (saver_) saver_->follow(closes);
  return closes;
}

/// This rank's reductions go on while it waits, and hold nobody up; nor does a rank that waits, too far
/// ahead, for reductions which this one only has to begin, also with gradients that lie in `.grad` yet.
std::vector<Close> Boundary::close(const Close& own, bool ends_pass) {
  const bool idle = !reducer_ || reducer_->advances_alone();
  std::optional<std::chrono::steady_clock::time_point> holds_up_since;
  for (;;) {
    if (auto closes = residency_.close_for(idle ? kPeriod : kTurn, own, ends_pass)) return *std::move(closes);
    if (preemption_ && preemption_->is_on()) preemption_->is_asked();
    if (!reducer_) continue;
    if (!idle) reducer_->go_on();
    const int64_t rounds = channels_.rounds().most_announced();
    if (rounds == 0 || !reducer_->keep_up(rounds) || !take_early_) {
      holds_up_since.reset();
      continue;
    }
    const auto now = std::chrono::steady_clock::now();
    if (!holds_up_since) holds_up_since = now;
    if (now - *holds_up_since < kTakesEarlyAfter) continue;
    take_early_();
    reducer_->end_coming();
    reducer_->keep_up(rounds);
  }
}

/// Nothing has changed on this rank, which may go on.
void Boundary::refuse_step(const std::vector<Close>& closes) const {
  const auto saves = [](const Close& close) { return close.call == Call::save_checkpoint; };
  const auto saver = std::find_if(closes.begin(), closes.end(), saves) - closes.begin();
  throw SaveMeetsStepError(
      "step(): " + channels_.mesh().name(channels_.data().ranks()[static_cast<size_t>(saver)]) +
      " handles an exception and calls save_checkpoint(), for which all ranks are needed. Nothing was "
      "changed on this rank, and nothing was saved: the last checkpoint is as it was. Have all ranks "
      "save where one fails, or save at steps, by \"checkpoint\": {\"on_preempt\": …} for signals");
}

void Boundary::check_calls(const std::vector<Close>& closes) const {
  const Close& leader = leading(closes);
  const auto& ranks = channels_.data().ranks();
  for (size_t i = 0; i < closes.size(); ++i) {
    // Ranks that have joined have no training loop: they drop or show gradients when the others do.
    const bool follows = closes[i].joined && (leader.call == Call::zero_grad || leader.call == Call::drop_gradients);
    // A rank that evaluates calls preempt() while others wait for it in a step, and one may read `.grad` alone.
    const auto may_meet = [](Call call) {
      return call == Call::step || call == Call::preempt || call == Call::show_gradients;
    };
    if (closes[i].call == leader.call || follows || (may_meet(closes[i].call) && may_meet(leader.call))) continue;
    throw CommError("the ranks called different methods: " + channels_.mesh().name(ranks[&leader - closes.data()]) +
                    " called " + call_name(leader.call) + ", " + channels_.mesh().name(ranks[i]) + " called " +
                    call_name(closes[i].call) +
                    ". Every rank must call the collective methods in the same order; ranks that run out of data call "
                    "join().");
  }
}

void Boundary::check_failures(const std::vector<Close>& closes, const std::exception_ptr& own) const {
  if (own) std::rethrow_exception(own);
  for (size_t i = 0; i < closes.size(); ++i) {
    if (!closes[i].failed) continue;
    throw std::runtime_error(std::string(call_name(closes[i].call)) + " failed on " +
                             channels_.mesh().name(channels_.data().ranks()[i]) +
                             " before it began; see its error. Nothing was changed on this rank");
  }
}

bool Boundary::has_private_writes() const {
  return std::any_of(model_.units().begin(), model_.units().end(),
                     [](const auto& unit) { return unit->has_private_writes(); });
}

/// All ranks are idle here: copies each rank's own writes, for its slice, into the shared parameters.
void Boundary::take_private_writes(const std::vector<Close>& closes) {
  if (std::none_of(closes.begin(), closes.end(), [](const Close& close) { return close.has_written; })) return;
  for (const auto& unit : model_.units()) unit->take_private_writes();
  channels_.control().barrier({"step", "waiting for all ranks' own writes to parameters"});
}

void Boundary::together_on_all_stages(const char* what, const std::function<void()>& work) {
  std::exception_ptr own;
  try {
    together(what, work);
  } catch (const CheckpointError&) {
    own = std::current_exception();
  }
  Stages* const stages = channels_.stages();
  const bool any = stages != nullptr && any_stage(*stages, own != nullptr, what);
  if (own) std::rethrow_exception(own);
  if (any) throw CheckpointError(std::string(what) + " failed on another stage; see its error");
}

void Boundary::vote(const char* what, const std::string& failure) {
  const auto votes = exchange(comm::Vote{.failed = !failure.empty()}, {"checkpoint", what});
  if (!failure.empty()) throw CheckpointError(failure);
  for (size_t i = 0; i < votes.size(); ++i) {
    if (!votes[i].failed) continue;
    throw CheckpointError(std::string(what) + " failed on " + channels_.mesh().name(channels_.data().ranks()[i]) +
                          "; see its error");
  }
}

}  // namespace deeptide::engine
