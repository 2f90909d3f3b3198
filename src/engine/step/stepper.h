// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Turns a loss into new parameters: close the micro-batch, reduce, judge, clip, step, publish.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "deeptide/engine.h"
#include "engine/bind/live_model.h"
#include "engine/run/last_boundary.h"
#include "engine/run/losses.h"
#include "engine/run/preemption.h"
#include "engine/run/progress.h"
#include "engine/run/rewind.h"
#include "engine/step/boundary.h"
#include "engine/step/drift_guard.h"
#include "engine/step/gradient_intake.h"
#include "engine/step/kept_gradients.h"
#include "engine/step/link_report.h"
#include "engine/step/saver.h"
#include "engine/step/skipped_steps.h"
#include "engine/step/step_terms.h"
#include "gradients/reducer.h"
#include "optim/schedule.h"
#include "report/reporter.h"
#include "zero/sharded_optimizer.h"
#include "zero/states/policy.h"

namespace deeptide {
class Compression;
}  // namespace deeptide

namespace deeptide::engine {

/// The parts of the engine that a step uses. The engine outlives the stepper.
struct StepperParts {
  const Config& config;
  const BatchSizes& batch;
  const zero::StagePolicy& policy;
  Channels& channels;
  Boundary& boundary;
  BoundModel& model;
  LiveModel& live;
  sharding::Residency& residency;
  gradients::Reducer* reducer;        // null: nothing to train
  GradientIntake* intake;             // null: nothing to train
  KeptGradients* kept;                // null: .grad holds nothing
  zero::ShardedOptimizer* optimizer;  // null: nothing to train
  zero::Arrivals* arrivals;           // null: the optimizer waits for what it publishes
  Progress& progress;
  Rewind* rewind;  // null: the configuration asks for none
  LinkReport& links;
  report::Reporter& reporter;
  Saver& saver;
  Preemption& preemption;
  LastBoundary& last;
};

class Stepper {
 public:
  /// `schedule`: null for a constant learning rate.
  Stepper(const StepperParts& parts, std::unique_ptr<optim::Schedule> schedule);

  void backward(const at::Tensor& loss, bool retain_graph);
  /// Runs backward of a stage whose outputs another one took. The gradients are multiplied by the loss scale already.
  void backward_from(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& gradients);
  /// Collective. `joined`: this rank has no more batches. Empty if all ranks have joined.
  std::optional<StepOutcome> step(bool joined);
  /// Collective.
  void zero_grad();
  /// Collective. Drops what backward gave the parameters of these tensors since the last step, and no other's.
  /// Errors: ValueError if ranks name different ones.
  void drop_gradients(const std::vector<at::Tensor>& of);
  /// Collective, with ranks that are in step(). `.grad` of each parameter holds its whole gradient until step().
  void show_gradients();
  /// `make`: makes this rank's KeptGradients once a program looks at `.grad` without "keep_grad".
  void keep_by(std::function<KeptGradients*()> make) { make_kept_ = std::move(make); }
  /// Collective, with ranks that are in step(). Drops the gradients of the step to come.
  void preempt();

  /// With KeptGradients, or on a device: called as autograd is about to accumulate a gradient.
  void meet_backward();

  bool is_boundary() const;
  void set_boundary(std::optional<bool> boundary);
  /// Whether ranks keep their gradients and exchange signs in the step to come.
  bool keeps_gradients() const { return signs_; }
  /// Set by the program; empty: the count of micro-batches decides.
  std::optional<bool> boundary_override() const { return boundary_override_; }
  /// The schedule starts there; by group.
  const std::vector<Hyperparameters>& base_hyperparameters() const { return base_hyperparameters_; }
  /// The factor of losses in backward; 1 unless the model computes in fp16.
  double loss_scale() const { return parts_.progress.loss_scale.scale; }
  /// Counts the engine's own changes of hyper-parameters.
  int64_t hyperparameters_version() const { return hyperparameters_version_; }

  /// The schedule that goes along with applied steps; null: none.
  const std::shared_ptr<Compression>& compression() const { return compression_; }
  void set_compression(std::shared_ptr<Compression> compression) { compression_ = std::move(compression); }

  /// Adopts a checkpoint's progress. `moments`: with optimizer steps and hyper-parameters; `schedule`: with the
  /// schedule's position.
  void restore(const Progress& saved, bool moments, bool schedule);

 private:
  std::vector<comm::Close> close(bool joined);
  bool steps_alone() const;
  StepOutcome accumulate_alone();
  void check_has_gradient(const std::vector<comm::Close>& closes) const;
  StepOutcome end_step(const std::vector<comm::Close>& closes);
  StepOutcome finished(StepOutcome outcome);
  int64_t bytes_sent_for_steps();
  void take_gradients();
  void follow(const std::vector<comm::Close>& closes);
  void end_backward();
  bool keeps_always() const;
  void show(const std::vector<comm::Close>& closes);
  void drop(const std::vector<comm::Close>& closes, std::vector<uint8_t> marks);
  void say_mixture();
  std::vector<comm::Verdict> judge();
  StepOutcome accumulating() const;
  bool agrees_to_go();
  StepOutcome step_aside(const std::vector<comm::Close>& closes);
  StepOutcome apply(const std::vector<comm::Verdict>& verdicts);
  void apply_gradients(const std::vector<comm::Verdict>& verdicts, double scale);
  void end_micro_batch();
  void follow_boundary();
  bool exchanges_signs() const;
  void follow_schedule();
  /// The schedules of what came back.
  void follow_rewind();
  void follow_loss_scale();

  StepperParts parts_;
  std::unique_ptr<optim::Schedule> schedule_;
  std::shared_ptr<Compression> compression_;
  std::vector<Hyperparameters> base_hyperparameters_;
  std::optional<bool> boundary_override_;
  int64_t hyperparameters_version_ = 0;
  bool signs_ = false;       // see keeps_gradients
  bool said_signs_ = false;  // told of the first such step
  int64_t sent_bytes_ = 0;   // by this rank for steps so far
  Losses losses_;
  int awaited_task_ = -1;                                       // of autograd: end_backward() follows it
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // what autograd calls at its end asks for it
  StepTerms terms_;
  SkippedSteps skipped_;
  DriftGuard drift_;
  std::function<KeptGradients*()> make_kept_;
  std::string drifted_;  // the error that this step ends with, if copies differ; else empty
};

}  // namespace deeptide::engine
