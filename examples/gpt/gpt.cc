// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Trains a byte-level GPT with Deeptide: `deeptide --num_ranks 2 build/examples/gpt/gpt`. The twin of gpt.py.
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "corpus.h"
#include "deeptide/deeptide.h"
#include "model.h"
#include "report.h"
#include "stop.h"

namespace gpt {
namespace {

using nlohmann::json;

constexpr int kExitInterrupted = 130;  // what a shell expects of a program that ^C ended

struct Arguments {
  std::string config = "examples/gpt/ds_config.json";
  std::optional<std::string> data;
  std::filesystem::path out = "runs/gpt";
  bool resume = false;
  std::optional<int64_t> steps;
  std::optional<double> minutes;
  int64_t eval_every = 50;
  int64_t save_every = 200;
  uint64_t seed = 0;
  std::optional<int> threads;
  bool print_losses = false;
};

void declare(CLI::App& app, Arguments& args) {
  app.add_option("--config", args.config, "ds_config.json")->capture_default_str();
  app.add_option("--data", args.data, "A file or folder of text (default: the source of Python's standard library)");
  app.add_option("--out", args.out, "Folder for losses and checkpoints")->capture_default_str();
  app.add_flag("--resume", args.resume, "Go on from the newest checkpoint in --out");
  app.add_option("--steps", args.steps, "Optimizer steps (default: the schedule's total_num_steps)");
  app.add_option("--minutes", args.minutes, "Stop early after this time");
  app.add_option("--eval-every", args.eval_every)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--save-every", args.save_every)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--seed", args.seed)->capture_default_str();
  app.add_option("--threads", args.threads, "Of each rank (default: its share of the cores)");
  app.add_flag("--print-losses", args.print_losses, "One line per step for other programs, no summary");
}

void use_threads(std::optional<int> threads) {
  const char* local = std::getenv("LOCAL_WORLD_SIZE");
  const int ranks_here = local ? std::max(1, std::atoi(local)) : 1;
  at::set_num_threads(
      threads.value_or(std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / ranks_here)));
}

/// Steps of a schedule that knows its total.
int64_t total_steps_of(const deeptide::SchedulerConfig& scheduler) {
  return std::visit(
      [](const auto& chosen) -> int64_t {
        if constexpr (requires { chosen.total_steps; }) {
          return chosen.total_steps;
        } else {
          throw std::invalid_argument("the configuration has no schedule with total_num_steps; give --steps");
        }
      },
      scheduler);
}

const char* name_of(deeptide::DataType type) {
  switch (type) {
    case deeptide::DataType::bf16:
      return "bf16";
    case deeptide::DataType::fp16:
      return "fp16";
    default:
      return "fp32";
  }
}

// A model, its engine and its data.
class Trainer {
 public:
  explicit Trainer(const Arguments& args)
      : args_(args),
        config_(deeptide::Config::from_file(args.config)),
        model_(GPTConfig{}, args.seed),
        parameters_(count_parameters(*model_)),
        engine_(deeptide::initialize(*model_, config_)),
        batch_(engine_.batch_sizes()),
        corpus_(load_corpus(args.data, model_->config().context)),
        sampler_(corpus_.train.size(), {.batch_size = batch_.micro,
                                        .rank = engine_.world().rank,
                                        .world_size = engine_.world().size,
                                        .shuffle = true,
                                        .drop_last = true,
                                        .seed = args.seed}),
        total_(args.steps ? *args.steps : total_steps_of(config_.scheduler())) {
    if (args.resume) resume();
  }

  // Trains to the end; returns false if ^C came first.
  bool run(Report& report) {
    int64_t step = start_;
    bool stopped = false;
    StopRequest stop(engine_.world(), args_.minutes);
    while (step < total_ && !stopped) {
      stop.before_step(++step);
      at::Tensor loss;
      deeptide::StepOutcome outcome;
      for (int64_t micro = 0; micro < batch_.accumulation; ++micro) {
        const auto [tokens, targets] = next_batch();
        loss = model_(tokens, targets);
        engine_.backward(loss);
        outcome = engine_.step();
      }
      report.step(step, loss.item<double>(), outcome.lr);
      stopped = stop.agreed(step);
      const bool last = stopped || step == total_;
      if (last || step % args_.eval_every == 0) report.held_out(step, evaluate());
      if (last || step % args_.save_every == 0) save(step);
    }
    report.end_of_training(step);
    return !stop.interrupted();
  }

  // The mean loss on windows spread evenly over the held-out text: the same on every rank.
  double evaluate() {
    const torch::NoGradGuard no_grad;
    constexpr int64_t kBatches = 4, kSize = 16;
    const int64_t available = corpus_.held_out.size(), count = std::min(kBatches * kSize, available);
    double total = 0.0;
    for (int64_t first = 0; first < count; first += kSize) {
      std::vector<int64_t> windows;
      for (int64_t i = first; i < std::min(first + kSize, count); ++i) windows.push_back(i * available / count);
      const auto [tokens, targets] = corpus_.held_out.batch(windows, engine_.device());
      total += model_(tokens, targets).item<double>() * static_cast<double>(windows.size());
    }
    return total / static_cast<double>(count);
  }

  Run describe() const {
    return {.parameters = parameters_,
            .ranks = engine_.world().size,
            .stage = config_.zero().stage,
            .dtype = name_of(config_.compute_dtype()),
            .tokens_per_step = batch_.train * model_->config().context,
            .total_steps = total_};
  }

  std::string sample() { return model_->generate("\n    def ", 400, gpt::kTemperature); }
  const deeptide::Engine& engine() const { return engine_; }
  int64_t start() const { return start_; }
  const std::string& checkpoint() const { return checkpoint_; }

 private:
  static int64_t count_parameters(const GPTImpl& model) {
    int64_t count = 0;
    for (const auto& parameter : model.parameters()) count += parameter.numel();
    return count;
  }

  // Model, optimizer, schedule and data position of the newest checkpoint, if there is one.
  void resume() {
    const auto loaded = engine_.load_checkpoint(args_.out / "checkpoints");
    if (!loaded) return;
    const json state = json::parse(loaded->client_state_json);
    start_ = state.at("step");
    checkpoint_ = loaded->path;
    sampler_.set_position({.epoch = state.at("epoch"), .batch = state.at("samples").get<int64_t>() / world_batch()});
  }

  void save(int64_t step) {
    const auto [epoch, batch] = sampler_.position();
    // In samples of the whole world: it holds for another number of ranks too.
    const json state = {{"step", step}, {"epoch", epoch}, {"samples", batch * world_batch()}};
    checkpoint_ = engine_.save_checkpoint(args_.out / "checkpoints", "step_" + std::to_string(step), state.dump());
  }

  int64_t world_batch() const { return batch_.micro * engine_.world().size; }

  Windows::Batch next_batch() {
    auto indices = sampler_.next();
    if (indices.empty()) indices = sampler_.next();  // empty once, at an epoch's end
    return corpus_.train.batch(indices, engine_.device());
  }

  Arguments args_;
  deeptide::Config config_;
  GPT model_;
  int64_t parameters_;  // counted before the engine shards them
  deeptide::Engine engine_;
  deeptide::BatchSizes batch_;
  Corpus corpus_;
  deeptide::DistributedSampler sampler_;
  int64_t total_;
  int64_t start_ = 0;
  std::string checkpoint_ = "none";
};

int train(const Arguments& args) {
  use_threads(args.threads);
  Trainer trainer(args);
  Report report(trainer.describe(), args.out, trainer.start(), trainer.engine().world().rank, args.print_losses);
  if (trainer.start() > 0) {
    report.say("resumed from " + trainer.checkpoint());
  } else {
    report.held_out(0, trainer.evaluate());
  }
  if (!trainer.run(report)) {
    report.say("Stopped; nothing is lost, it is all in " + trainer.checkpoint() + ". Go on with RESUME=1 (--resume).");
    return kExitInterrupted;
  }
  if (!args.print_losses) report.summary(trainer.sample(), trainer.engine().memory(), trainer.checkpoint());
  return 0;
}

}  // namespace
}  // namespace gpt

int main(int argc, char** argv) {
  gpt::Arguments args;
  CLI::App app("Trains a byte-level GPT with Deeptide.");
  gpt::declare(app, args);
  CLI11_PARSE(app, argc, argv);
  try {
    return gpt::train(args);
  } catch (const c10::Error& error) {
    std::cerr << "gpt: " << error.what_without_backtrace() << std::endl;
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "gpt: " << error.what() << std::endl;
    return 1;
  }
}
