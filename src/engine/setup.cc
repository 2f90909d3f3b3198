// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Builds an engine: world, channels, units, residency, reducer, optimizer, hooks.
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include "base/log.h"
#include "deeptide/allocator.h"
#include "deeptide/errors.h"
#include "device/parallel.h"
#include "engine/agreement.h"
#include "engine/engine_impl.h"
#include "engine/optimizer_groups.h"
#include "optim/compressed_rule.h"
#include "optim/custom_rule.h"

namespace deeptide {

using at::ScalarType;

namespace {

ScalarType scalar_type(DataType type) {
  static constexpr ScalarType kTypes[] = {at::kFloat, at::kHalf, at::kBFloat16};
  return kTypes[static_cast<int>(type)];
}

std::unique_ptr<optim::Rule> custom_rule_of(const InitOptions& options) {
  return options.custom ? std::make_unique<optim::CustomRule>(options.custom->info()) : nullptr;
}

const optim::Rule* rule_of(const Config& config, const InitOptions& options) {
  const std::string type = options.optimizer.value_or(config.optimizer().type);
  return type.empty() ? nullptr : &optim::find_rule(type);
}

/// Returns the stage's policy. Errors: ConfigError where the rule needs what the stage cuts.
zero::StagePolicy policy_of(const Config& config, const optim::Rule* rule) {
  const int stage = config.zero().stage;
  if (stage > 0 && dynamic_cast<const optim::CompressedRule*>(rule)) {
    throw ConfigError(fmt::format(
        "{}: zero_optimization.stage is {}, but {} needs stage 0: each rank steps whole parameters, with a momentum of "
        "its own gradients. Set the stage to 0, or choose another optimizer",
        config.origin(), stage, rule->name()));
  }
  return zero::kStages.at(stage);
}

/// By group: matrices of a rule that takes them whole need other states than the rest, so other units.
std::vector<int> kinds_of(const optim::Rule* rule, const std::vector<ParameterGroup>& groups) {
  std::vector<int> kinds;
  for (const ParameterGroup& group : groups) {
    const bool whole = rule && rule->reach(group.hyperparameters) == optim::Reach::whole_parameter;
    kinds.push_back(whole ? 1 : 0);
  }
  return kinds;
}

/// Collective. Returns `model` if all ranks have the same model, groups and configuration.
const ModelDescription& agreed(const ModelDescription& model, const std::vector<ParameterGroup>& groups,
                               const Config& config, comm::Group& control) {
  engine::check_agreement(control, engine::terms_of(model, groups, config),
                          {"start", "comparing model and configuration with the other ranks"},
                          "Build the same model, groups and configuration on every rank");
  return model;
}

/// Absent: shards lie in memory.
std::optional<zero::ParameterOffload> parameter_offload(const Config& config) {
  const OffloadParamConfig& asked = config.offload_param();
  if (asked.device != OffloadDevice::nvme) return std::nullopt;  // on a CPU the host's memory is where they are
  const std::string subject = config.origin() + ": zero_optimization.offload_param.device \"nvme\" ";
  if (config.zero().stage != 3) {
    throw ConfigError(subject + "needs stage 3, where each rank keeps a shard of the parameters; the stage is " +
                      std::to_string(config.zero().stage));
  }
  if (asked.folders.empty()) {
    throw ConfigError(subject + "needs nvme_path: a folder on the drive, or a list of folders");
  }
  if (config.runtime().on_skipped == OnSkipped::rewind) {
    throw ConfigError(subject +
                      "does not go with deeptide.on_skipped \"rewind\", which keeps a copy of the parameters "
                      "in memory; choose \"skip\" or \"raise\"");
  }
  return zero::ParameterOffload{asked.folders, asked.max_in_cpu.value_or(0), asked.buffer_count, asked.buffer_size};
}

engine::BindOptions bind_options(const Config& config, const zero::StagePolicy& policy, const optim::Rule* rule,
                                 const CustomOptimizer* custom, const std::vector<ParameterGroup>& groups) {
  engine::BindOptions options;
  // Ranks that share parameters each step a part of them.
  options.share_memory = policy.shard_optimizer || !custom || custom->needs_whole().empty();
  options.offload = parameter_offload(config);
  if (dynamic_cast<const optim::CompressedRule*>(rule)) options.share_memory = false;  // each keeps whole states
  options.kinds = kinds_of(rule, groups);
  options.compute_dtype = scalar_type(config.compute_dtype());
  options.shard_parameters = policy.shard_parameters;
  options.persistence_threshold = config.zero().param_persistence_threshold;
  options.model_persistence_threshold = config.zero().model_persistence_threshold;
  // A unit moves in one collective, so the bucket sizes bound it.
  options.max_unit_numel = std::min(config.zero().reduce_bucket_size, config.zero().allgather_bucket_size);
  if (config.runtime().unit_size > 0)
    options.max_unit_numel = std::min(options.max_unit_numel, config.runtime().unit_size);
  if (rule) options.trained_by = config.origin();
  return options;
}

sharding::ResidencyLimits residency_limits(const Config& config, const engine::BoundModel& model) {
  sharding::ResidencyLimits limits;
  // DeepSpeed's default of 1e9 would keep most models whole; overlap needs at most a quarter of the model.
  const int64_t chosen = std::min<int64_t>(1'000'000'000, model.num_elements() / 4);
  limits.max_live = config.zero().max_live_parameters.value_or(chosen);
  limits.max_reuse_distance = config.zero().max_reuse_distance.value_or(INT64_MAX);
  limits.prefetch = config.zero().overlap_comm ? config.zero().prefetch_bucket_size : 0;
  // One block stays free for the shard that is being gathered.
  if (model.offloaded()) limits.read_ahead_bytes = model.offloaded()->staging_bytes() - tiers::kSwapBlockBytes;
  return limits;
}

/// Whether a core of this machine is idle while all its ranks compute.
bool has_idle_core(const host::Host& host, const comm::Team& team) {
  const bool knows_all_ranks = team.size() == 1 || host.size() > 1;
  return knows_all_ranks && num_cores() > host.size() * at::get_num_threads();
}

bool wants_side_thread(const Config& config, const host::Host& host, const comm::Team& team) {
  if (!config.zero().overlap_comm || config.runtime().reduce_thread == ReduceThread::off) return false;
  return config.runtime().reduce_thread == ReduceThread::on || has_idle_core(host, team);
}

/// Whether to keep received rows unsummed until step(): if no further micro-batch is added to them, each rank steps at
/// most its shard, and all rows of a shard take at most the memory of their sum in fp32.
bool keeps_rows(const Config& config, const BatchSizes& batch, const comm::Team& team,
                const zero::StagePolicy& policy) {
  constexpr size_t kBytesOfSum = sizeof(float);
  const size_t bytes_of_rows = static_cast<size_t>(team.size()) * c10::elementSize(reduce_type(config));
  const bool steps_shard = policy.shard_optimizer || team.size() == 1;
  const bool ordered = config.runtime().reduction == Reduction::ordered;
  return steps_shard && batch.accumulation == 1 && ordered && bytes_of_rows <= kBytesOfSum;
}

gradients::ReducerOptions reducer_options(const Config& config, const BatchSizes& batch, const comm::Team& team,
                                          const zero::StagePolicy& policy) {
  gradients::ReducerOptions options;
  options.reduce_dtype = reduce_type(config);
  options.ordered = config.runtime().reduction == Reduction::ordered;
  options.overlap = config.zero().overlap_comm;
  options.accumulates_whole = !policy.reduce_every_micro && batch.accumulation > 1;
  const bool mean = config.gradients().op == GradientOp::mean;
  options.scale = 1.0 / static_cast<double>(batch.accumulation * (mean ? team.size() : 1));
  return options;
}

/// Tells of a learning rate that the program has set and the schedule overrides: one of the two is a mistake.
void warn_of_rates(const Config& config, const std::vector<ParameterGroup>& groups) {
  const auto peak = optim::peak_of(config.scheduler());
  for (size_t g = 0; peak && g < groups.size(); ++g) {
    const Hyperparameters& hyper = groups[g].hyperparameters;
    const auto index = hyper.optimizer() ? hyper.optimizer()->find("lr") : std::nullopt;
    if (!index || hyper.lr() == peak->lr || hyper.lr() == hyper.optimizer()->hyperparameters[*index].fallback) continue;
    return log(
        LogLevel::warning,
        fmt::format("lr {:g} of optimizer group {} has no effect: the schedule {} rises to {:g} in every group; set "
                    "scheduler.params.{} to the rate that you mean",
                    hyper.lr(), g, scheduler_type(config.scheduler()), peak->lr, peak->key));
  }
}

}  // namespace

at::ScalarType reduce_type(const Config& config) {
  return scalar_type(config.precision().communication_dtype.value_or(config.compute_dtype()));
}

Engine::Impl::Impl(const ModelDescription& description, const Config& given, const InitOptions& options)
    : config(given),
      ledger(std::make_shared<device::Ledger>()),
      channels(options.world, config),
      notice(channels.board()),
      batch(config.batch_sizes(channels.mesh().size(world::Axis::data))),
      custom(options.custom),
      custom_rule(custom_rule_of(options)),
      rule(custom_rule ? custom_rule.get() : rule_of(config, options)),
      policy(policy_of(config, rule)),
      groups(engine::optimizer_groups(description, config, options)),
      model(agreed(description, groups, config, channels.control()), engine::named_groups(groups),
            bind_options(config, policy, rule, custom.get(), groups), *channels.host(), channels.gathers(), ledger),
      live(model, description, options.describe) {
  if (config.offload_param().device != OffloadDevice::none && !model.device().is_cpu()) {
    throw ConfigError(config.origin() + ": zero_optimization.offload_param is not supported yet on " +
                      model.device().str() + "; set its device to \"none\"");
  }
  if (model.arena()) policy = zero::on_one_host(policy);
  if (config.runtime().tune_allocator && model.device().is_cpu()) install_cpu_allocator();
  residency = std::make_unique<sharding::Residency>(model.sharded(), channels.gathers(), channels.control(), ledger,
                                                    model.device(), residency_limits(config, model));
  if (rule) make_trainer();
  boundary = std::make_unique<engine::Boundary>(channels, model, *residency, reducer.get());
  const engine::StepperParts parts{config,   batch,       policy,        channels,     *boundary,  model,
                                   live,     *residency,  reducer.get(), intake.get(), kept.get(), optimizer.get(),
                                   progress, rewind.get()};
  stepper = std::make_unique<engine::Stepper>(parts, optim::make_schedule(config.scheduler()));
  if (channels.is_first()) log(LogLevel::info, summary());
  if (channels.is_first()) warn_of_rates(config, this->groups);
  if (channels.is_first() && config.report().dump_state) {
    log(LogLevel::info, "configuration " + config.origin() + ":\n" + config.text());
  }
  notice.succeed();
}

Engine::Impl::~Impl() {
  intake.reset();
  channels.board()->report_failure("has ended training at step " + std::to_string(progress.global_steps));
  release_idle_cpu_memory();  // the program may not need what this engine's steps needed
}

/// Absent: states lie in memory, beside the parameters.
zero::StatePlacement Engine::Impl::place_states() {
  const OffloadOptimizerConfig& asked = config.offload_optimizer();
  if (asked.device == OffloadDevice::none) return {};
  if (!model.device().is_cpu()) {
    throw ConfigError(config.origin() + ": zero_optimization.offload_optimizer is not supported yet on " +
                      model.device().str() + "; set its device to \"none\"");
  }
  if (asked.device == OffloadDevice::cpu || asked.ratio == 0.0) return {};  // the host's memory is where they are
  if (asked.folders.empty()) {
    throw ConfigError(config.origin() +
                      ": zero_optimization.offload_optimizer.device \"nvme\" needs nvme_path: a folder "
                      "on the drive, or a list of folders");
  }
  const int kinds = 1 + static_cast<int>(rule->roles().size());
  offloaded = std::make_unique<zero::OffloadedStates>(
      zero::OffloadOptions{asked.folders, asked.ratio, kinds * static_cast<int>(asked.buffer_count)}, ledger);
  return [states = offloaded.get()](int64_t numel) { return states->place(numel); };
}

void Engine::Impl::make_trainer() {
  if (config.runtime().keep_grad && config.zero().stage == 3) {
    throw ConfigError(config.origin() +
                      ": deeptide.keep_grad keeps whole gradients on every rank, which stage 3 is there to avoid. "
                      "Choose stage 0, 1 or 2, or read them by safe_get_full_grad(parameter) before step()");
  }
  if (config.runtime().keep_grad && dynamic_cast<const optim::CompressedRule*>(rule)) {
    throw ConfigError(config.origin() + ": deeptide.keep_grad shows the ranks' mean gradient, which " + rule->name() +
                      " does not form in steps by signs; leave keep_grad out, or choose another optimizer");
  }
  for (const ParameterGroup& group : groups) {
    engine::check_hyperparameters(group.hyperparameters, &rule->info());
    progress.hyperparameters.push_back(group.hyperparameters);
  }
  const auto trainable = model.trainable();
  engine::check_matrices(trainable, *rule, progress.hyperparameters);
  const bool on_cpu = model.device().is_cpu();
  auto how = reducer_options(config, batch, channels.data(), policy);
  how.accumulates_whole = how.accumulates_whole || dynamic_cast<const optim::CompressedRule*>(rule) != nullptr;
  if (!on_cpu) how.finite_check = gradients::FiniteCheckTime::each_step;
  how.side_thread = on_cpu && wants_side_thread(config, *channels.host(), channels.data());
  how.keep_rows = on_cpu && !config.runtime().keep_grad && keeps_rows(config, batch, channels.data(), policy) &&
                  trainable.size() <= host::Exchange::kMaxOffers / 4;
  how.while_ahead = [this](int64_t rounds) { residency->attend(rounds); };
  auto exchange = model.arena() ? std::make_unique<host::Exchange>(channels.host(), model.arena()) : nullptr;
  auto& reductions = channels.reductions();
  reducer =
      std::make_unique<gradients::Reducer>(trainable, reductions, std::move(exchange), ledger, model.device(), how);
  optimizer = std::make_unique<zero::ShardedOptimizer>(trainable, *rule, progress.hyperparameters, policy, ledger,
                                                       reductions, model.device(), place_states(), custom.get());
  if (config.runtime().on_skipped == OnSkipped::rewind) {
    if (offloaded) {
      throw ConfigError(config.origin() +
                        ": deeptide.on_skipped \"rewind\" keeps a copy of the states in memory, which does not go with "
                        "zero_optimization.offload_optimizer.device \"nvme\"; choose \"skip\" or \"raise\"");
    }
    rewind = std::make_unique<engine::Rewind>(*optimizer, model, live, ledger, config.runtime().rewind_interval);
  }
  std::function<void()> before;
  if (config.runtime().keep_grad) {
    kept = std::make_unique<engine::KeptGradients>(trainable, *reducer, channels, ledger, model.device());
    before = [this] { stepper->meet_backward(); };
  }
  intake = std::make_unique<engine::GradientIntake>(trainable, *reducer, std::move(before));
}

}  // namespace deeptide
