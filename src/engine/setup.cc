// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Builds an engine: world, channels, units, residency, reducer, optimizer, hooks.
#include <ATen/Parallel.h>

#include <chrono>
#include <functional>

#include "base/libraries/format.h"
#include "base/log.h"
#include "base/text.h"
#include "data/sections.h"
#include "deeptide/allocator.h"
#include "deeptide/errors.h"
#include "device/memory/cached_memory.h"
#include "device/parallel.h"
#include "engine/bind/agreement.h"
#include "engine/bind/offload_ratio.h"
#include "engine/design/optimizer_groups.h"
#include "engine/engine_impl.h"
#include "engine/step/across_stages.h"

namespace deeptide {

using Purpose = engine::Channels::Purpose;

namespace {

/// Collective. Returns what a design takes from `model` if all ranks have the same model, groups and configuration.
engine::ModelFacts agreed(const ModelDescription& model, const Config& config, const InitOptions& options,
                          comm::Group& control) {
  data::check_sections(config);
  auto groups = engine::optimizer_groups(model, config, options);
  engine::check_agreement(control, engine::terms_of(model, groups, config),
                          {"start", "comparing model and configuration with the other ranks"},
                          "Build the same model, groups and configuration on every rank");
  return engine::read_model(model, std::move(groups));
}

/// Collective. Returns the design once the channels that it needs are open.
const engine::Design& opened(engine::Channels& channels, const engine::Design& design) {
  channels.open(design.channels());
  channels.connect(design.model.device);
  return design;
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

/// Whether layers wait for other ranks of a stage 3 without serving it, on devices or in groups of their own: who waits
/// there answers no round, so that ranks could wait for each other in a circle.
bool runs_one_program(const engine::Design& design, const TensorTeam* team) {
  if (!design.policy.shard_parameters || design.topology.mesh.size(world::Axis::tensor) == 1) return false;
  return !design.on_cpu() || (team != nullptr && team->layers_have_own_groups());
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
        format_text("lr {:g} of optimizer group {} has no effect: the schedule {} rises to {:g} in every group; set "
                    "scheduler.params.{} to the rate that you mean",
                    hyper.lr(), g, scheduler_type(config.scheduler()), peak->lr, peak->key));
  }
}

/// The root module's type.
std::string type_of(const ModelDescription& model) {
  const auto found = std::find_if(model.modules.begin(), model.modules.end(),
                                  [](const ModuleInfo& module) { return module.path.empty(); });
  return found == model.modules.end() ? "" : found->type;
}

}  // namespace

Engine::Impl::Impl(const ModelDescription& description, const Config& given, const InitOptions& options)
    : config(given),
      ledger(std::make_shared<device::Ledger>(config.runtime().device_memory_cap)),
      channels(options.world, config, options.axes.get()),
      notice((channels.name_engine(type_of(description)), channels.board())),
      batch(config.batch_sizes(channels.topology().num_batches())),
      custom(options.custom),
      settled(engine::settle(agreed(description, config, options, channels.control()), config, options, channels)),
      model(description, opened(channels, design), engine::buffer_types_of(config.precision()),
            design.is_shared ? settled.arena : nullptr, channels, ledger),
      origin(description, options),
      live(model, description, options.describe, options.buffers),
      last(live, model.device()),
      links(channels),
      reporter(config, reporting()) {
  if (config.runtime().tune_allocator && model.device().is_cpu()) install_cpu_allocator();
  // Frees the parameters as they came, block by block, which fit nothing that the engine and its steps allocate.
  device::release_cached_memory(model.device());
  auto limits = design.residency;
  // One block stays free for the shard that is being gathered.
  if (model.offloaded() && model.offloaded()->uses_files())
    limits.read_ahead_bytes = model.offloaded()->staging_bytes() - tiers::kSwapBlockBytes;
  if (runs_one_program(design, channels.tensor_team())) channels.rounds().take_wishes_as_alike();
  residency = std::make_unique<sharding::Residency>(model.sharded(), channels.all(Purpose::gathers), channels.rounds(),
                                                    ledger, model.device(), limits);
  if (design.rule) {
    if (auto* const stages = channels.stages()) {
      engine::check_stages_train(*stages, model.num_trainable(), config.origin());
    }
    make_trainer();
  }
  boundary = std::make_unique<engine::Boundary>(channels, model, *residency, reducer.get(), arrivals.get());
  saver = std::make_unique<engine::Saver>(channels, config.checkpoint(), optimizer.get(), lost_peers);
  preemption = std::make_unique<engine::Preemption>(channels, config.checkpoint());
  boundary->watch(*saver, *preemption);
  const engine::StepperParts parts{config,         batch,      design.policy, channels,     *boundary,  model,
                                   live,           *residency, reducer.get(), intake.get(), kept.get(), optimizer.get(),
                                   arrivals.get(), progress,   rewind.get(),  links,        reporter,   *saver,
                                   *preemption,    last};
  stepper = std::make_unique<engine::Stepper>(parts, optim::make_schedule(config.scheduler()));
  stepper->keep_by([this] { return keep_gradients(); });
  last.note(progress.micro_steps);
  if (channels.is_first()) log(LogLevel::info, config.report().dump_state ? summary() : brief());
  if (channels.is_first()) warn_of_rates(config, design.model.groups);
  if (channels.is_first() && config.report().dump_state) {
    log(LogLevel::info, "configuration " + config.origin() + ":\n" + config.text());
  }
  ledger->set_advice([this] { return memory_advice(); });
  serve_tensor_team();
  if (config.jsonl_monitor().enabled)
    reporter.start(summary(), memory());
  else
    reporter.start("", {});
  notice.succeed();
}

/// A rank that waits for those that share its layers may be what they wait for, and learns here why they do not come.
void Engine::Impl::serve_tensor_team() {
  auto* const team = channels.tensor_team();
  if (team == nullptr) return;
  const auto begin = std::make_shared<std::chrono::steady_clock::time_point>();
  const auto meanwhile = [this, begin] {
    if (channels.data().size() > 1) residency->attend();
    if (reducer) reducer->go_on();
    const auto now = std::chrono::steady_clock::now();
    if (now - *begin < world::kPollFailures) return;
    *begin = now;
    const auto failure = channels.board()->failure("waits for the ranks that share its layers");
    if (failure && channels.board()->is_failure()) {
      throw CommError(format_text("{} stopped, waiting for the ranks that share its layers: {}",
                                  channels.mesh().name(channels.world().rank), *failure));
    }
  };
  team->serve(meanwhile, channels.recorder());
}

report::Reporting Engine::Impl::reporting() {
  const auto device = model.device();
  return {.rank = channels.world().rank,
          .ranks = channels.data().ranks(),
          .has_stages = channels.stages() != nullptr,
          .clock = first_line_of("/proc/sys/kernel/random/boot_id"),
          .device = device,
          .dtype = model.units().empty() ? at::kFloat : model.units().front()->layout().dtype,
          .train_batch = batch.train,
          .recorder = channels.recorder(),
          .ledger = ledger,
          .slow_link = [this] { return links.slow_text(); },
          .memory = [this] { return memory(); }};
}

Engine::Impl::~Impl() {
  ledger->set_advice({});
  if (auto* const team = channels.tensor_team()) team->serve({}, nullptr);
  saver.reset();  // before the others learn that this rank ends
  intake.reset();
  if (const std::string text = links.text(); channels.is_first() && !text.empty()) log(LogLevel::info, text);
  arrivals.reset();  // before the others learn that this rank ends: they may still receive from it
  channels.board()->report_end("has ended training at step " + std::to_string(progress.global_steps));
  release_idle_cpu_memory();  // the program may not need what this engine's steps needed
}

/// Collective. Measures what the configuration leaves to the start, and designs anew with it.
void Engine::Impl::measure_ratio() {
  const bool on_host = design.types.uses_host();
  const auto role = on_host ? device::Role::host_optimizer : device::Role::optimizer;
  const engine::RatioTrial trial{*design.rule, design.hyperparameters.front(), ledger,
                                 role,         design.states_in_files,         model.offloaded() != nullptr};
  const double ratio = on_host ? engine::measure_host_share(trial, model.device(), channels.control())
                               : engine::measure_ratio(trial, channels.control());
  if (design.states_in_files) most_bytes_of_states = engine::bytes_to_measure();
  progress.offload_ratio = ratio;
  engine::Topology measured = design.topology;
  measured.ratio = ratio;
  settled.design = engine::design(design, config, measured);
}

/// Absent: states lie in memory, beside the parameters. The host's memory is not page-locked for them: what crosses to
/// a device passes through blocks that are.
zero::StatePlacement Engine::Impl::place_states() {
  const auto role = design.types.uses_host() ? device::Role::host_optimizer : device::Role::optimizer;
  if (design.states_in_files) {
    offloaded = std::make_unique<tiers::Offload>(*design.states_in_files, ledger, role, "optimizer states");
    return std::bind_front(&tiers::Offload::place, offloaded.get());
  }
  if (!design.types.uses_host()) return {};
  return [counted = ledger, role](int64_t numel, int64_t, at::ScalarType dtype) {
    return tiers::Buffer::resident(device::allocate_flat(counted, role, numel, dtype, at::kCPU));
  };
}

/// Whether whole units, and nothing else, are gathered after a step. Default: between hosts and on CPUs only: elsewhere
/// little is gained.
bool Engine::Impl::publishes_late() {
  const bool gathers = design.policy.shard_optimizer && !design.policy.shard_parameters && !design.is_shared &&
                       design.topology.tenancies.empty();
  const bool unasked = channels.are_between_hosts() && model.device().is_cpu();
  const bool wanted = config.runtime().overlap_publish.value_or(unasked);
  return wanted && gathers && channels.data().size() > 1;
}

void Engine::Impl::make_trainer() {
  const optim::Rule& rule = *design.rule;
  for (const ParameterGroup& group : design.model.groups) {
    engine::check_hyperparameters(group.hyperparameters, &rule.info());
    progress.hyperparameters.push_back(group.hyperparameters);
  }
  const auto trainable = model.trainable();
  engine::check_matrices(trainable, rule, progress.hyperparameters);
  if (design.measures_ratio) measure_ratio();
  zero::StatePlacement place = place_states();
  const bool on_cpu = design.on_cpu();
  auto how = design.reductions;
  how.side_thread = on_cpu && wants_side_thread(config, *channels.host(), channels.data());
  auto exchange = settled.arena ? std::make_unique<host::Exchange>(channels.host(), settled.arena) : nullptr;
  reducer = std::make_unique<gradients::Reducer>(trainable, channels.all(Purpose::reductions), std::move(exchange),
                                                 ledger, model.device(), how, residency.get());
  optimizer = std::make_unique<zero::ShardedOptimizer>(trainable, rule, progress.hyperparameters, design.policy, ledger,
                                                       channels.all(Purpose::reductions), model.device(),
                                                       std::move(place), custom.get(), design.types);
  optimizer->tell(*residency);
  if (config.runtime().on_skipped == OnSkipped::rewind) {
    rewind = std::make_unique<engine::Rewind>(*optimizer, model, live, ledger, config.runtime().rewind_interval);
  }
  if (publishes_late()) {
    arrivals = std::make_unique<zero::Arrivals>(trainable, channels.gathers(), model.device());
    optimizer->publish_through(*arrivals);
  }
  std::function<void()> before;
  if (config.runtime().keep_grad) {
    kept = std::make_unique<engine::KeptGradients>(trainable, *reducer, channels, ledger, model.device());
  }
  if (kept || !on_cpu) before = [this] { stepper->meet_backward(); };
  intake = std::make_unique<engine::GradientIntake>(trainable, *reducer, channels.is_first(), std::move(before));
}

}  // namespace deeptide
