// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Takes a step's micro-batches, runs this stage, and tells every stage the loss.

#include <numeric>

#include "base/digest.h"
#include "base/json.h"
#include "base/libraries/format.h"
#include "deeptide/binding.h"
#include "deeptide/pipeline.h"
#include "engine/pipeline/stage_run.h"

namespace deeptide {
namespace {

using engine::StageRun;

/// The configuration's. Errors: ConfigError for what the model's cut does not go with.
PipelineSchedule chosen_schedule(const Config& config, const PipelineModule& model) {
  const JsonValue section = parse_json(binding::section_text(config, "parallel"), "the section");
  const JsonValue& pipeline = section.find("pipeline")->value;
  const auto asked = [&](const char* key, const JsonValue& value, int is) {
    if (value.is(JsonKind::null) || value.number == is) return;
    throw ConfigError(
        format_text("parallel.{} is {}, and the PipelineModule has {}; leave the key out", key, value.number, is));
  };
  asked("pipeline", pipeline.find("stages")->value, model.num_stages());
  asked("chunks", section.find("chunks")->value, model.num_chunks());
  if (to_text(pipeline.find("cut")->value).find("by_block") == std::string::npos) {
    throw ConfigError(
        "parallel.pipeline.cut is given, and a PipelineModule is cut by its own bounds; leave the key out");
  }
  if (config.runtime().keep_grad && model.num_stages() > 1) {
    throw ConfigError(
        "train_batch leaves no moment between backward and step, in which deeptide.keep_grad shows gradients; leave "
        "the key out");
  }
  const std::string name = section.find("schedule")->value.string;
  const bool is_chunked = model.num_chunks() > 1;
  if ((is_chunked && (name == "gpipe" || name == "zero_bubble")) ||
      (!is_chunked && name == "interleaved" && model.num_stages() > 1)) {
    throw ConfigError(format_text(
        "parallel.schedule is \"{}\", and the PipelineModule has {} chunks on each stage: those of one "
        "chunk run by 1f1b, gpipe or zero_bubble, others interleaved; build it with another number, or leave the key "
        "out",
        name, model.num_chunks()));
  }
  if (is_chunked) return PipelineSchedule::interleaved;
  if (name == "zero_bubble" && model.num_stages() > 1) return PipelineSchedule::zero_bubble;  // else nobody waits
  return name == "gpipe" ? PipelineSchedule::gpipe : PipelineSchedule::one_f_one_b;
}

InitOptions options_of(const PipelineModule& model, InitOptions options) {
  options.world = model.world();
  if (model.num_stages() > 1) options.axes = pipeline_axes(model.num_stages(), model.world().size);
  return options;
}

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

uint64_t digest_of(const Activations& tensors, uint64_t so_far) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    const at::Tensor bytes = tensor.detach().cpu().contiguous();
    so_far = so_far * 31 + digest_of_bytes(bytes.const_data_ptr(), bytes.nbytes());
  }
  return so_far;
}

/// To compare with another stage's; 0 where one of them does without inputs or targets. A double holds 52 bits of it.
double digest_of(const std::vector<MicroBatch>& batches) {
  uint64_t digest = 1;
  for (const MicroBatch& batch : batches) {
    if (batch.inputs.empty() || batch.targets.empty()) return 0.0;
    digest = digest_of(batch.targets, digest_of(batch.inputs, digest));
  }
  return batches.empty() ? 0.0 : static_cast<double>(digest >> 12);
}

}  // namespace

struct PipelineEngine::Impl {
  Impl(std::shared_ptr<PipelineModule> made, Loss loss_of, const Config& config, const InitOptions& options)
      : model(std::move(made)),
        loss(std::move(loss_of)),
        schedule(chosen_schedule(config, *model)),
        engine(describe(*model), config, looking(options)),
        stage(model->num_stages() > 1 ? std::make_unique<PipelineStage>(engine) : nullptr),
        run(engine, stage.get(), *model, loss) {
    const JsonValue section = parse_json(binding::section_text(config, "pipeline"), "the section");
    const auto interval = static_cast<int>(section.find("activation_checkpoint_interval")->value.number);
    if (interval > 0) model->set_checkpoint_interval(interval);
  }

  InitOptions looking(const InitOptions& options) const {
    InitOptions found = options_of(*model, options);
    if (!found.describe) found.describe = [of = model] { return describe(*of); };
    return found;
  }

  std::vector<MicroBatch> take(const Batches& next, int64_t count) const {
    std::vector<MicroBatch> batches;
    if (model->stage() != 0 && model->stage() != model->num_stages() - 1) return batches;
    for (int64_t i = 0; i < count; ++i) batches.push_back(next());
    return batches;
  }

  /// Collective. The last stage's mean, on every rank. Errors: ValueError on all if the stages got other micro-batches.
  double agreed_loss(const std::vector<double>& losses, double digest) {
    const double own = losses.empty() ? 0.0 : engine.mean(mean_of(losses));
    if (!stage) return own;
    const std::vector<double> all = stage->exchange({digest, own});
    const double first = all.front(), last = all.at(all.size() - 2);
    TORCH_CHECK_VALUE(first == 0.0 || last == 0.0 || first == last, "the micro-batches of stages 0 and ",
                      model->num_stages() - 1,
                      " differ, so that the targets are not those of the inputs: `next` must return the same on both. "
                      "Seed what it draws alike, or return inputs alone on the first stage and targets alone on the "
                      "last");
    stage->begin_step();  // the next one
    return all.back();
  }

  void set_training(bool on) {
    model->train(on);
    for (const PipelineModule::Tie& tie : model->ties()) tie.module->train(on);
  }

  template <typename Work>
  auto told(const char* event, const Work& work) {
    try {
      return work();
    } catch (const std::exception& error) {
      engine.report_error(event, error.what());
      if (stage) stage->lose_step(std::string(event) + ": " + error.what());
      throw;
    }
  }

  std::shared_ptr<PipelineModule> model;
  Loss loss;
  PipelineSchedule schedule;
  Engine engine;
  std::unique_ptr<PipelineStage> stage;
  StageRun run;
};

PipelineEngine::PipelineEngine(std::shared_ptr<PipelineModule> model, Loss loss, const Config& config,
                               InitOptions options)
    : impl_(std::make_unique<Impl>(std::move(model), std::move(loss), config, std::move(options))) {}
PipelineEngine::~PipelineEngine() = default;
PipelineEngine::PipelineEngine(PipelineEngine&&) noexcept = default;
PipelineEngine& PipelineEngine::operator=(PipelineEngine&&) noexcept = default;

Engine& PipelineEngine::engine() { return impl_->engine; }
PipelineModule& PipelineEngine::model() { return *impl_->model; }
int PipelineEngine::data_rank() const { return impl_->stage ? impl_->stage->data_rank() : impl_->engine.world().rank; }
int PipelineEngine::data_size() const { return impl_->stage ? impl_->stage->data_size() : impl_->engine.world().size; }

PipelineStep PipelineEngine::train_batch(const Batches& next) {
  return impl_->told("failed in train_batch", [&] {
    const int64_t count = impl_->engine.batch_sizes().accumulation;
    const std::vector<MicroBatch> batches = impl_->take(next, count);
    const double digest = impl_->stage ? digest_of(batches) : 0.0;  // now: layers may write into their inputs
    impl_->set_training(true);
    auto [losses, outcome] = impl_->run.train(impl_->schedule, batches, static_cast<int>(count));
    return PipelineStep{impl_->agreed_loss(losses, digest), std::move(outcome)};
  });
}

double PipelineEngine::eval_batch(const Batches& next, int64_t micro_batches) {
  return impl_->told("failed in eval_batch", [&] {
    const std::vector<MicroBatch> batches = impl_->take(next, micro_batches);
    const double digest = impl_->stage ? digest_of(batches) : 0.0;
    const bool was_training = impl_->model->is_training();
    impl_->set_training(false);
    const std::vector<double> losses = impl_->run.evaluate(batches, static_cast<int>(micro_batches));
    if (impl_->stage) impl_->stage->meet();
    const double loss = impl_->agreed_loss(losses, digest);
    impl_->set_training(was_training);
    return loss;
  });
}

}  // namespace deeptide
