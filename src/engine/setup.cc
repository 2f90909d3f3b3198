// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Builds an engine: world, channels, units, residency, reducer, optimizer, hooks.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/log.h"
#include "deeptide/allocator.h"
#include "deeptide/errors.h"
#include "device/parallel.h"
#include "engine/agreement.h"
#include "engine/choices.h"
#include "engine/engine_impl.h"
#include "engine/gradient_places.h"
#include "engine/offload_ratio.h"
#include "engine/optimizer_groups.h"
#include "optim/compressed_rule.h"

namespace deeptide {

using device::Role;

namespace {

/// Collective. Returns `model` if all ranks have the same model, groups and configuration.
const ModelDescription& agreed(const ModelDescription& model, const std::vector<ParameterGroup>& groups,
                               const Config& config, comm::Group& control) {
  engine::check_offload(config, model);
  engine::check_agreement(control, engine::terms_of(model, groups, config),
                          {"start", "comparing model and configuration with the other ranks"},
                          "Build the same model, groups and configuration on every rank");
  return model;
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

/// Collective. Memory for the buckets of so many elements that the ranks of each host share; null on all ranks if one
/// of them has none.
std::shared_ptr<host::Arena> share_buckets(engine::Channels& channels, int64_t numel) {
  std::string why_not;
  auto arena =
      host::Arena::create(*channels.host(), /*parameter_bytes=*/0, host::Arena::heap_of_buckets(numel), why_not);
  const auto own = at::full({1}, arena ? 1 : 0, at::kByte), all = at::empty({channels.control().size()}, at::kByte);
  auto pending = channels.control().all_gather(all, own);
  channels.control().wait(pending, {"start", "telling which hosts share memory"});
  if (all.all().item<bool>()) return arena;
  if (!why_not.empty() && channels.host()->index() == 0) {
    log(LogLevel::warning, "ranks of one host do not sum their gradients before they travel: " + why_not);
  }
  return nullptr;
}

/// Collective. Through it the ranks of this host reduce in place; null if they do not, which `how` says then.
std::unique_ptr<host::Exchange> make_exchange(engine::Channels& channels, const engine::BoundModel& model,
                                              gradients::ReducerOptions& how) {
  const auto arena = how.together > 1 ? share_buckets(channels, model.num_elements()) : model.arena();
  if (!arena) how.together = 1;
  return arena ? std::make_unique<host::Exchange>(channels.host(), arena) : nullptr;
}

std::vector<std::vector<std::string>> names_of(const std::vector<sharding::Unit*>& units) {
  std::vector<std::vector<std::string>> names(units.size());
  for (size_t i = 0; i < units.size(); ++i) {
    for (const sharding::Parameter& p : units[i]->parameters()) names[i].push_back(p.name);
  }
  return names;
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

Engine::Impl::Impl(const ModelDescription& description, const Config& given, const InitOptions& options)
    : config(given),
      ledger(std::make_shared<device::Ledger>(config.runtime().device_memory_cap)),
      channels(options.world, config),
      notice(channels.board()),
      batch(config.batch_sizes(channels.mesh().size(world::Axis::data))),
      custom(options.custom),
      custom_rule(engine::custom_rule_of(options)),
      rule(custom_rule ? custom_rule.get() : engine::rule_of(config, options)),
      policy(engine::policy_of(config, rule)),
      groups(engine::optimizer_groups(description, config, options)),
      model(agreed(description, groups, config, channels.control()), engine::named_groups(groups),
            engine::bind_options(config, policy, rule, custom.get(), groups, engine::device_of(description)),
            *channels.host(), channels.gathers(), ledger),
      origin(description, options.optimizer),
      live(model, description, options.describe),
      links(channels) {
  if (model.arena()) policy = zero::on_one_host(policy);
  if (config.runtime().tune_allocator && model.device().is_cpu()) install_cpu_allocator();
  auto limits = engine::residency_limits(config, model.num_elements());
  // One block stays free for the shard that is being gathered.
  if (model.offloaded() && model.offloaded()->uses_files())
    limits.read_ahead_bytes = model.offloaded()->staging_bytes() - tiers::kSwapBlockBytes;
  residency = std::make_unique<sharding::Residency>(model.sharded(), channels.gathers(), channels.control(), ledger,
                                                    model.device(), limits);
  if (rule) make_trainer(description);
  boundary = std::make_unique<engine::Boundary>(channels, model, *residency, reducer.get(), arrivals.get());
  const engine::StepperParts parts{config,         batch,      policy,        channels,     *boundary,  model,
                                   live,           *residency, reducer.get(), intake.get(), kept.get(), optimizer.get(),
                                   arrivals.get(), progress,   rewind.get(),  links};
  stepper = std::make_unique<engine::Stepper>(parts, optim::make_schedule(config.scheduler()));
  if (channels.is_first()) log(LogLevel::info, summary());
  if (channels.is_first()) warn_of_rates(config, this->groups);
  if (channels.is_first() && config.report().dump_state) {
    log(LogLevel::info, "configuration " + config.origin() + ":\n" + config.text());
  }
  ledger->set_advice([this] { return memory_advice(); });
  notice.succeed();
}

Engine::Impl::~Impl() {
  ledger->set_advice({});
  intake.reset();
  if (const std::string text = links.text(); channels.is_first() && !text.empty()) log(LogLevel::info, text);
  arrivals.reset();  // before the others learn that this rank ends: they may still receive from it
  channels.board()->report_end("has ended training at step " + std::to_string(progress.global_steps));
  release_idle_cpu_memory();  // the program may not need what this engine's steps needed
}

std::vector<zero::UnitForecast> Engine::Impl::stepped_units(const std::vector<sharding::Unit*>& trainable) const {
  std::vector<zero::UnitForecast> units;
  for (const sharding::Unit* unit : trainable) {
    std::set<int> unit_groups;
    for (const sharding::Parameter& p : unit->parameters()) unit_groups.insert(p.group);
    units.push_back(engine::stepped_unit(unit->layout(), std::move(unit_groups), policy, zero::lies_off_device(*unit)));
  }
  return units;
}

/// Absent: states lie in memory, beside the parameters. The host's memory is not page-locked for them: what crosses to
/// a device passes through blocks that are.
zero::StatePlacement Engine::Impl::place_states(const std::vector<sharding::Unit*>& trainable,
                                                zero::StateTypes& types) {
  const auto units = stepped_units(trainable);
  engine::choose_host_share(config, *rule, progress.hyperparameters, units, types);
  const bool on_host = types.uses_host();
  const auto states = zero::forecast(units, *rule, progress.hyperparameters, types);
  auto options = engine::state_offload(config, *rule, model.device(), states);
  if (!options && !on_host) return {};
  const Role role = on_host ? Role::host_optimizer : Role::optimizer;
  if (engine::measures_ratio(config)) {
    const engine::RatioTrial trial{*rule,   progress.hyperparameters.front(), ledger, role,
                                   options, model.offloaded() != nullptr};
    const double ratio = on_host ? engine::measure_host_share(trial, model.device(), channels.control())
                                 : engine::measure_ratio(trial, channels.control());
    (on_host ? types.host_share : options->ratio) = progress.offload_ratio = ratio;
    if (on_host && !types.uses_host()) return {};
    most_bytes_of_states = std::max(most_bytes_of_states, options ? engine::bytes_to_measure() : 0);
  }
  if (!options) {
    return [counted = ledger, role](int64_t numel, at::ScalarType dtype) {
      return tiers::Buffer::resident(device::allocate_flat(counted, role, numel, dtype, at::kCPU));
    };
  }
  offloaded = std::make_unique<tiers::Offload>(*options, ledger, role, "optimizer states");
  return [states = offloaded.get()](int64_t numel, at::ScalarType dtype) { return states->place(numel, dtype); };
}

/// Where whole units, and nothing else, are gathered after a step. Unasked, between hosts and on CPUs only: elsewhere
/// little is gained.
bool Engine::Impl::publishes_late() {
  const bool gathers = policy.shard_optimizer && !policy.shard_parameters && !model.arena();
  const bool unasked = channels.are_between_hosts() && model.device().is_cpu();
  const bool wanted = config.runtime().overlap_publish.value_or(unasked);
  return wanted && gathers && channels.data().size() > 1;
}

void Engine::Impl::make_trainer(const ModelDescription& description) {
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
  zero::StateTypes types = engine::state_types(config, *rule, groups, model.device());
  engine::check_matrices(trainable, *rule, progress.hyperparameters);
  const bool on_cpu = model.device().is_cpu();
  auto how = engine::reducer_options(config, batch, channels.data().size(), policy,
                                     {.num_units = trainable.size(),
                                      .shard_numel = sharding::shard_numel(sharding::layouts_of(trainable)),
                                      .on_cpu = on_cpu,
                                      .rule = rule,
                                      .ranks_per_host = channels.host()->is_in_order() ? channels.host()->size() : 1});
  how.side_thread = on_cpu && wants_side_thread(config, *channels.host(), channels.data());
  const bool travels = on_cpu && !model.arena() && channels.data().size() > 1;
  if (travels) how.mostly_zero = engine::mostly_zero_units(config, *rule, description.modules, names_of(trainable));
  zero::StatePlacement place = place_states(trainable, types);
  how.stays = engine::sums_on_device(config, *rule, model.device(), stepped_units(trainable), policy,
                                     channels.data().size(), types);
  how.while_ahead = [this](int64_t rounds) { residency->attend(rounds); };
  auto exchange = make_exchange(channels, model, how);
  auto& reductions = channels.reductions();
  reducer =
      std::make_unique<gradients::Reducer>(trainable, reductions, std::move(exchange), ledger, model.device(), how);
  if (!on_cpu) residency->follow([this] { return reducer ? reducer->progress() : sharding::ReductionProgress(); });
  optimizer =
      std::make_unique<zero::ShardedOptimizer>(trainable, *rule, progress.hyperparameters, policy, ledger, reductions,
                                               model.device(), std::move(place), custom.get(), types);
  optimizer->tell(*residency);
  if (config.runtime().on_skipped == OnSkipped::rewind) {
    if (offloaded) {
      throw ConfigError(config.origin() +
                        ": deeptide.on_skipped \"rewind\" keeps a copy of the states in memory, which does not go with "
                        "states in files (zero_optimization.offload_optimizer, deeptide.placement.optimizer_states); "
                        "choose \"skip\" or \"raise\"");
    }
    rewind = std::make_unique<engine::Rewind>(*optimizer, model, live, ledger, config.runtime().rewind_interval);
  }
  if (publishes_late()) {
    arrivals = std::make_unique<zero::Arrivals>(trainable, channels.gathers(), model.device());
    optimizer->publish_through(*arrivals);
  }
  std::function<void()> before;
  if (config.runtime().keep_grad) {
    kept = std::make_unique<engine::KeptGradients>(trainable, *reducer, channels, ledger, model.device());
    before = [this] { stepper->meet_backward(); };
  }
  intake = std::make_unique<engine::GradientIntake>(trainable, *reducer, std::move(before));
}

}  // namespace deeptide
