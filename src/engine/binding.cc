// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Answers a language front from the layers that know.
#include "deeptide/binding.h"

#include <algorithm>

#include "bench/collective_bench.h"
#include "config/elasticity.h"
#include "config/section.h"
#include "config/table/schema.h"
#include "engine/engine_impl.h"
#include "numerics/sums/ordered_sum.h"
#include "ops/kernels.h"
#include "optim/rules/two_pass_rule.h"
#include "sharding/gate.h"
#include "tiers/spill/spill.h"
#include "world/distributed_options.h"

namespace deeptide::binding {
namespace {

bench::Collective collective_of(const std::string& name) {
  for (const bench::Collective collective : bench::kCollectives) {
    if (name == bench::name_of(collective)) return collective;
  }
  throw ConfigError("collective '" + name +
                    "': expected all-reduce, all-gather, reduce-scatter, all-to-all or broadcast");
}

}  // namespace

SchedulerParameters scheduler_parameters(const Config& config) {
  SchedulerParameters parameters;
  const auto* variant = config::find_variant(*config::find_key("scheduler.params"), scheduler_type(config.scheduler()));
  if (!variant) return parameters;
  for (const config::Key& key : variant->keys) {
    const JsonValue value = key.binding ? key.binding->read(key, config.sections()) : JsonValue();
    if (value.is(JsonKind::null)) continue;
    if (value.is(JsonKind::string)) {
      parameters.words[key.name] = value.string;
    } else {
      parameters.numbers[key.name] = value.is(JsonKind::boolean) ? value.boolean : value.number;
    }
  }
  return parameters;
}

std::string section_text(const Config& config, std::string_view path) {
  return to_text(config::section_with_defaults(config, path));
}

ElasticBatch elastic_batch(const ElasticityConfig& config, int64_t world_size) {
  return config::elastic_batch_unchecked(config, world_size);
}

std::vector<std::string> state_roles(const OptimizerInfo& optimizer) {
  std::vector<std::string> names;
  if (find_optimizer(optimizer.name) != &optimizer) return names;  // the caller's own: it tells when it has stepped
  for (const optim::StateRole& role : optim::find_rule(optimizer.name).roles()) names.emplace_back(role.name);
  return names;
}

bool is_muon_matrix(const std::string& name, const std::vector<int64_t>& sizes) {
  return optim::is_muon_matrix(name, sizes);
}

std::vector<std::pair<std::string, std::string>> kernel_targets() {
  return {{"optimizer", optim::kernel_target()},
          {"gradient sums", numerics::kernel_target()},
          {"operators", ops::kernel_target()}};
}

std::optional<Discovery> find_place(const DistributedOptions& options) {
  return world::find_place(world::Environment::of_process(), options);
}

std::chrono::milliseconds timeout_of(const DistributedOptions& options) {
  return world::timeout_of(world::Environment::of_process(), options);
}

void run_as_operator(const std::vector<at::Tensor>& tensors, const std::vector<bool>& written,
                     const std::function<void()>& work) {
  sharding::run_as_operator(tensors, written, work);
}

uint64_t sharded_unit(const at::Tensor& tensor) { return sharding::lent_unit(tensor); }

CollectiveBench::CollectiveBench(const World& world, c10::ScalarType dtype, c10::Device device, int64_t max_bytes,
                                 bool shared_memory)
    : bench_(std::make_unique<bench::CollectiveBench>(world, dtype, device, max_bytes, shared_memory)) {}
CollectiveBench::~CollectiveBench() = default;

std::string CollectiveBench::path() const { return bench_->path(); }
int CollectiveBench::num_hosts() const { return bench_->num_hosts(); }

CollectiveTimes CollectiveBench::measure(const std::string& collective, int64_t bytes, int warmups, int trials) {
  return bench_->measure(collective_of(collective), bytes, warmups, trials);
}

double bus_factor(const std::string& collective, int world_size) {
  return bench::bus_factor(collective_of(collective), world_size);
}

Spill::Spill(const std::shared_ptr<Engine>& engine, const std::vector<std::string>& folders, int num_blocks)
    : engine_(engine), waits_(!folders.empty() && !engine->device().is_cpu()) {
  const auto& ledger = EngineAccess::impl_of(*engine).ledger;
  const tiers::OffloadOptions options{folders, std::max(num_blocks, 4)};
  spill_ = folders.empty() ? tiers::spill_to_host(ledger) : tiers::spill_to_files(options, ledger, engine->device());
}

Spill::~Spill() = default;

int64_t Spill::put(const at::Tensor& tensor) {
  before_host_waits();
  return spill_->put(tensor);
}

at::Tensor Spill::get(int64_t id) {
  before_host_waits();
  return spill_->get(id);
}

/// Bytes of files pass through the host, which waits for the device, and with it for other ranks.
void Spill::before_host_waits() const {
  if (!waits_) return;
  const std::shared_ptr<Engine> engine = engine_.lock();
  if (engine && EngineAccess::impl_of(*engine).reducer) EngineAccess::impl_of(*engine).reducer->before_host_waits();
}

void Spill::drop(int64_t id) noexcept { spill_->drop(id); }
int64_t Spill::peak_bytes() const { return spill_->peak_bytes(); }

}  // namespace deeptide::binding
