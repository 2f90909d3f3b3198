// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Looks for requests once per step, in the memory that the launcher shares with the rank.
#include "report/recordings.h"

#include <exception>
#include <utility>

#include "base/log.h"
#include "trace/flight_log.h"

namespace deeptide::report {

Recordings::Recordings(const TimelineConfig& config, std::shared_ptr<trace::Recorder> recorder, Owner owner)
    : config_(config),
      recorder_(std::move(recorder)),
      owner_(std::move(owner)),
      seen_(trace::flight_log().last_traced()) {}

Recordings::~Recordings() {
  if (timeline_) end();
}

void Recordings::note_exchange(int64_t step) {
  if (timeline_) timeline_->note_exchange(step);
}

void Recordings::follow(int64_t step) {
  if (timeline_ && step >= last_step_) end();
  obey(step);
  if (config_.enabled && !timeline_ && step == config_.start_step - 1) {
    begin(config_.output_path, step + config_.num_steps);
  }
}

void Recordings::obey(int64_t step) {
  const auto wish = trace::flight_log().trace_wish(seen_);
  if (!wish) return;
  if (timeline_) end();
  seen_ = wish->number;
  if (wish->num_steps > 0)
    begin(wish->folder, step + wish->num_steps);
  else
    trace::flight_log().traced(seen_);
}

void Recordings::begin(std::string folder, int64_t last_step) {
  folder_ = std::move(folder);
  last_step_ = last_step;
  timeline_ = std::make_unique<Timeline>(owner_.rank, owner_.world, owner_.clock);
  recorder_->add(*timeline_);
}

void Recordings::end() {
  recorder_->remove(*timeline_);
  try {
    const std::string path = timeline_->write(folder_);
    if (owner_.rank == 0) {
      log(LogLevel::info, "timeline: each rank has written its own beside " + path + "; 'deeptide trace " + folder_ +
                              "' joins them for ui.perfetto.dev");
    }
  } catch (const std::exception& error) {  // what observes a run does not end it
    log(LogLevel::warning, error.what());
  }
  timeline_.reset();
  trace::flight_log().traced(seen_);
}

void Recordings::forget() {
  if (!timeline_) return;
  recorder_->remove(*timeline_);
  timeline_.reset();
}

}  // namespace deeptide::report
