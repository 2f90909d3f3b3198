// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Takes a save from phase to phase.
#include "engine/step/saver.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <utility>

#include "base/interrupt.h"
#include "base/libraries/format.h"
#include "base/log.h"
#include "base/text.h"
#include "deeptide/plan.h"
#include "engine/bind/mesh_votes.h"
#include "engine/step/host_tables.h"

namespace deeptide::engine {

using checkpoint::BackgroundSave;
using checkpoint::SavePhase;
using std::chrono::steady_clock;

namespace {

constexpr size_t kErrorBytes = 512;  // of a rank's error, that all ranks tell

double ms(std::chrono::nanoseconds time) { return std::chrono::duration<double, std::milli>(time).count(); }

}  // namespace

void Saver::finish_alone() {
  if (!save_) return;
  if (optimizer_) optimizer_->states().before_changes({});
  config_.node_local ? leave_hosts() : leave();
}

/// When training ends in good order, the others write to their ends too, and the tables say so.
void Saver::leave() {
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
  end({});
}

/// Other hosts' tables lie in folders that this one does not see. When training ends in good order, all ranks come
/// here.
void Saver::leave_hosts() {
  const checkpoint::SaveTarget target = save_->plan().target;
  const std::string path = this->path();
  save_->wait_idle([] {});
  std::string cause = "another rank did not write";
  try {
    if (!*lost_peers_ && !channels_.board()->is_failure()) finish();
    if (!save_) return;
  } catch (const std::exception& error) {
    cause = error.what();
  }
  log(LogLevel::error, "the checkpoint " + path + " was not saved: " + cause);
  if (save_) save_->live().give_up();
  end({});
  checkpoint::abandon(target);
}

std::string Saver::path() const { return save_->plan().target.directory + "/" + save_->plan().target.tag; }

int64_t Saver::most_kept_bytes() const {
  if (config_.snapshot_bytes > 0) return config_.snapshot_bytes;
  const auto local = static_cast<int64_t>(std::max(1, channels_.host()->size()));
  return machine_limits({}).memory_bytes / 4 / local;
}

void Saver::begin(checkpoint::SavePlan plan, steady_clock::time_point since, Boundary& boundary) {
  boundary_ = &boundary;
  of_stage_.clear();
  leaders_.clear();
  hold_ = std::make_unique<TerminationHold>();
  save_ = std::make_unique<BackgroundSave>(std::move(plan), most_kept_bytes());
  exit_hook_ = std::make_unique<ExitHook>([this] { finish_alone(); });
  if (optimizer_) optimizer_->states().before_changes([this](int unit) { save_->live().changing(unit); });
  save_->live().keep_unprotected();
  wait_ = {};
  call_ = steady_clock::now() - since;
}

void Saver::follow(const std::vector<comm::Close>& closes) {
  if (!save_) return;
  of_stage_.clear();
  for (const comm::Close& close : closes) of_stage_.push_back(static_cast<SavePhase>(close.save));
  if (channels_.stages() == nullptr) advance(of_stage_);
}

void Saver::meet_stages() {
  if (!save_ || of_stage_.empty() || channels_.stages() == nullptr) return;
  advance(MeshVotes(channels_).with_other_stages(of_stage_, {"checkpoint", "following the save beside training"}));
}

void Saver::finish() {
  const auto start = steady_clock::now();
  while (save_) {
    save_->wait_idle(check_interrupts);
    const auto all = MeshVotes(channels_).exchange(phase(), {"checkpoint", "finishing the save beside training"});
    wait_ = steady_clock::now() - start;
    advance(all);
  }
}

/// `phases`: of all ranks of the mesh.
void Saver::advance(const Phases& phases) {
  const auto is = [&](SavePhase wanted) { return [wanted](SavePhase phase) { return phase == wanted; }; };
  if (std::any_of(phases.begin(), phases.end(), is(SavePhase::failed))) return fail(save_->failure());
  if (leaders_.empty()) {
    if (std::all_of(phases.begin(), phases.end(), is(SavePhase::written))) begin_commit();
    return;
  }
  for (size_t rank = 0; rank < phases.size(); ++rank) {
    if (leaders_[rank] != 0 && phases[rank] != SavePhase::committed) return;
  }
  succeed();
}

/// Collective: rank 0 commits, or a rank in each folder of hosts that have their own.
void Saver::begin_commit() {
  bool commits = channels_.is_first();
  if (config_.node_local) {
    try {
      commits = share_tables(channels_, *boundary_, save_->plan().target);
    } catch (const CheckpointError& error) {
      return fail(error.what());
    }
  }
  leaders_.assign(static_cast<size_t>(channels_.world().size), 0);
  leaders_[0] = 1;
  if (config_.node_local) {
    leaders_ = MeshVotes(channels_).exchange(static_cast<uint8_t>(commits), {"checkpoint", "telling who commits"});
  }
  if (commits) save_->commit();
}

/// Collective: all ranks name the first one that failed, and its file. `error`: this rank's; empty: none.
void Saver::fail(const std::string& error) {
  SaveResult result{path(), ""};
  const checkpoint::SaveTarget target = save_->plan().target;
  std::array<char, kErrorBytes> own{};
  // One that has failed since is for the others to see only if they look for it too.
  std::strncpy(own.data(), error.c_str(), own.size() - 1);
  save_->live().give_up();
  end({});  // once no rank writes, rank 0 removes what is there
  const auto all = MeshVotes(channels_).exchange_all(std::span<const char>(own),
                                                     {"checkpoint", "telling why the save beside training failed"});
  for (size_t rank = 0; rank * kErrorBytes < all.size() && result.error.empty(); ++rank) {
    const std::string text(all.data() + rank * kErrorBytes);
    if (!text.empty()) result.error = format_text("{}: {}", channels_.mesh().name(static_cast<int>(rank)), text);
  }
  if (channels_.is_first() || config_.node_local) checkpoint::abandon(target);
  if (channels_.is_first()) {
    log(LogLevel::error, "the checkpoint " + result.path + " was not saved: " + result.error);
  }
  result_ = std::move(result);
}

/// Collective.
void Saver::succeed() {
  const double seconds = save_->seconds();
  const int64_t bytes = save_->written_bytes();
  const auto waited = save_->live().waited();  // the first of it within the call
  if (channels_.is_first()) {
    log(LogLevel::info,
        format_text("{} was saved beside training: {} of this rank in {:.2f} s ({:.2f} GB/s); training waited {:.0f} "
                    "ms in save_checkpoint, {:.0f} ms in all for copies (at most {} at a time), {:.0f} ms for the end",
                    path(), bytes_text(bytes), seconds, static_cast<double>(bytes) / 1e9 / std::max(seconds, 1e-9),
                    ms(call_), ms(waited), bytes_text(save_->live().peak_bytes()), ms(wait_)));
  }
  end({path(), ""});
}

void Saver::end(SaveResult result) {
  exit_hook_.reset();
  if (optimizer_) optimizer_->states().before_changes({});
  save_.reset();
  result_ = std::move(result);
  hold_.reset();
}

}  // namespace deeptide::engine
