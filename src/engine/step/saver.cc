// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Takes a save from phase to phase.
#include "engine/step/saver.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <utility>

#include "base/interrupt.h"
#include "base/log.h"
#include "base/text.h"
#include "deeptide/plan.h"

namespace deeptide::engine {

using checkpoint::BackgroundSave;
using checkpoint::SavePhase;
using std::chrono::steady_clock;

namespace {

constexpr size_t kErrorBytes = 512;  // of a rank's error, that all ranks tell

double ms(std::chrono::nanoseconds time) { return std::chrono::duration<double, std::milli>(time).count(); }

}  // namespace

/// When training ends in good order, the others write to their ends too, and the tables say so.
Saver::~Saver() {
  if (!save_) return;
  if (optimizer_) optimizer_->states().before_changes({});
  save_->wait_idle([] {});
  const auto& plan = save_->plan();
  const auto board = channels_.board();
  const bool commits = channels_.is_first() && save_->phase() == SavePhase::written;
  const auto is_hopeless = [&] { return *lost_peers_ || board->is_failure(); };
  if (commits && checkpoint::wait_for_tables(plan.target, plan.manifest.world_size, is_hopeless)) {
    save_->commit();
    save_->wait_idle([] {});
  }
  const std::string error = save_->failure();
  if (!error.empty()) log(LogLevel::error, "the checkpoint " + path() + " was not saved: " + error);
  if (channels_.is_first() && save_->phase() != SavePhase::committed) {
    if (error.empty()) log(LogLevel::error, "the checkpoint " + path() + " was not saved: another rank did not write");
    checkpoint::abandon(plan.target);
  }
}

std::string Saver::path() const { return save_->plan().target.directory + "/" + save_->plan().target.tag; }

int64_t Saver::most_kept_bytes() const {
  if (config_.snapshot_bytes > 0) return config_.snapshot_bytes;
  const auto local = static_cast<int64_t>(std::max(1, channels_.host()->size()));
  return machine_limits({}).memory_bytes / 4 / local;
}

void Saver::begin(checkpoint::SavePlan plan, steady_clock::time_point since) {
  hold_ = std::make_unique<TerminationHold>();
  save_ = std::make_unique<BackgroundSave>(std::move(plan), most_kept_bytes());
  if (optimizer_) optimizer_->states().before_changes([this](int unit) { save_->live().changing(unit); });
  save_->live().keep_unprotected();
  wait_ = {};
  call_ = steady_clock::now() - since;
}

void Saver::follow(const std::vector<comm::Close>& closes, Boundary& boundary) {
  if (!save_) return;
  std::vector<SavePhase> phases;
  for (const comm::Close& close : closes) phases.push_back(static_cast<SavePhase>(close.save));
  advance(phases, boundary);
}

void Saver::finish(Boundary& boundary) {
  const auto start = steady_clock::now();
  while (save_) {
    save_->wait_idle(check_interrupts);
    const auto own = static_cast<int32_t>(phase());
    const auto all = boundary.exchange_all(std::span(&own, 1), {"checkpoint", "finishing the save beside training"});
    std::vector<SavePhase> phases;
    for (const int32_t phase : all) phases.push_back(static_cast<SavePhase>(phase));
    wait_ = steady_clock::now() - start;
    advance(phases, boundary);
  }
}

void Saver::advance(const std::vector<SavePhase>& phases, Boundary& boundary) {
  const auto is = [&](SavePhase wanted) { return [wanted](SavePhase phase) { return phase == wanted; }; };
  if (std::any_of(phases.begin(), phases.end(), is(SavePhase::failed))) return fail(boundary);
  if (phases.front() == SavePhase::committed) return succeed();
  if (channels_.is_first() && std::all_of(phases.begin(), phases.end(), is(SavePhase::written))) save_->commit();
}

/// Collective: all ranks name the first one that failed, and its file.
void Saver::fail(Boundary& boundary) {
  SaveResult result{path(), ""};
  const checkpoint::SaveTarget target = save_->plan().target;
  std::array<char, kErrorBytes> own{};
  // One that has failed since is for the others to see only if they look for it too.
  std::strncpy(own.data(), save_->failure().c_str(), own.size() - 1);
  save_->live().give_up();
  end({});  // once no rank writes, rank 0 removes what is there
  const auto all =
      boundary.exchange_all(std::span<const char>(own), {"checkpoint", "telling why the save beside training failed"});
  for (size_t i = 0; i * kErrorBytes < all.size() && result.error.empty(); ++i) {
    const std::string text(all.data() + i * kErrorBytes);
    if (!text.empty()) result.error = fmt::format("rank {}: {}", channels_.data().ranks().at(i), text);
  }
  if (channels_.is_first()) {
    checkpoint::abandon(target);
    log(LogLevel::error, "the checkpoint " + result.path + " was not saved: " + result.error);
  }
  result_ = std::move(result);
}

void Saver::succeed() {
  const double seconds = save_->seconds();
  const int64_t bytes = save_->written_bytes();
  const auto waited = save_->live().waited();  // the first of it within the call
  if (channels_.is_first()) {
    log(LogLevel::info,
        fmt::format("{} was saved beside training: {} of this rank in {:.2f} s ({:.2f} GB/s); training waited {:.0f} "
                    "ms in save_checkpoint, {:.0f} ms in all for copies (at most {} at a time), {:.0f} ms for the end",
                    path(), bytes_text(bytes), seconds, static_cast<double>(bytes) / 1e9 / std::max(seconds, 1e-9),
                    ms(call_), ms(waited), bytes_text(save_->live().peak_bytes()), ms(wait_)));
  }
  end({path(), ""});
}

void Saver::end(SaveResult result) {
  if (optimizer_) optimizer_->states().before_changes({});
  save_.reset();
  result_ = std::move(result);
  hold_.reset();
}

}  // namespace deeptide::engine
