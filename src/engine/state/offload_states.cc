// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Moves states out of memory between two steps, and back.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <functional>

#include "base/libraries/format.h"
#include "base/log.h"
#include "base/text.h"
#include "deeptide/allocator.h"
#include "engine/engine_impl.h"

namespace deeptide {

using comm::Call;

namespace {

constexpr int kBlocksUnderWay = 3;  // of 4 MiB

std::vector<std::string> folders_of(const OffloadStates& what, const Config& config) {
  if (!what.folders.empty()) return what.folders;
  return config.placement().folders.empty() ? config.offload_optimizer().folders : config.placement().folders;
}

}  // namespace

/// Errors: ValueError where states cannot be moved, or would take gradients along.
void Engine::Impl::check_offloading(const OffloadStates& what) const {
  TORCH_CHECK_VALUE(optimizer != nullptr, "offload_states: this engine has no optimizer");
  TORCH_CHECK_VALUE(!optimizer->states().are_away(), "offload_states: the states are offloaded already");
  check_no_gradients("offload_states");
  TORCH_CHECK_VALUE(!custom, "offload_states is for the optimizers of deeptide: ", design.rule->name(),
                    ", your own, keeps its states itself");
  TORCH_CHECK_VALUE(!offloaded, "offload_states: the configuration keeps optimizer states in files already");
  TORCH_CHECK_VALUE(!rewind,
                    "offload_states: deeptide.on_skipped \"rewind\" keeps a copy of the states in memory, which would "
                    "stay there; choose \"skip\" or \"raise\"");
  TORCH_CHECK_VALUE(what.to != OffloadDevice::none, "offload_states: the device is \"none\", expected cpu or nvme");
  TORCH_CHECK_VALUE(what.to != OffloadDevice::nvme || !folders_of(what, config).empty(),
                    "offload_states to nvme needs nvme_path: a folder on the drive, or a list of folders");
}

/// Absent: the states stay where they are.
zero::StatePlacement Engine::Impl::place_away(const OffloadStates& what) {
  if (what.to == OffloadDevice::nvme) {
    const tiers::OffloadOptions options{folders_of(what, config), kBlocksUnderWay};
    const auto role = optimizer->states().use_host() ? device::Role::host_optimizer : device::Role::optimizer;
    away = std::make_unique<tiers::Offload>(options, ledger, role, "optimizer states");
    return std::bind_front(&tiers::Offload::place, away.get());
  }
  if (model.device().is_cpu()) return {};
  return
      [](int64_t numel, int64_t, at::ScalarType dtype) { return tiers::Buffer::resident(at::zeros({numel}, dtype)); };
}

void Engine::Impl::offload_states(const OffloadStates& what) {
  const at::NoGradGuard no_grad;
  boundary->enter(Call::offload_states, [&](comm::Close& own) {
    own.rounds = reducer ? reducer->rounds_begun() : 0;
    check_offloading(what);
  });
  saver->finish();
  zero::OptimizerStates& states = optimizer->states();
  states.refresh_masters();
  const int64_t before = optimizer->predicted_bytes();
  const int64_t counted = states.use_host() ? states.host_bytes() : before;
  try {
    boundary->together("moving states to files", [&] {
      const zero::StatePlacement place = place_away(what);
      const bool from_host = what.to == OffloadDevice::nvme;
      if (place && what.masters) states.move_masters(place, from_host);
      if (place && what.moments) states.move_moments(place, from_host);
    });
  } catch (const CheckpointError& error) {
    states.bring_back();
    away.reset();
    throw std::runtime_error(std::string("offload_states: ") + error.what() + ". All states are in memory again");
  }
  if (what.gradients) reducer->release_memory();
  release_idle_cpu_memory();
  states.set_away(true);
  most_bytes_of_states = std::max(most_bytes_of_states, counted + (away ? away->staging_bytes() : 0));
  if (!channels.is_first()) return;
  const std::string left = format_text("{} of {} of optimizer states stay in memory on this rank",
                                       bytes_text(optimizer->predicted_bytes()), bytes_text(before));
  const bool here = what.to == OffloadDevice::cpu && model.device().is_cpu();
  log(LogLevel::info,
      here ? "offload_states: a CPU engine's states lie in the host's memory, where \"cpu\" leaves them; "
             "device \"nvme\" with an nvme_path moves them to files"
           : "offload_states: " + left);
}

void Engine::Impl::reload_states() {
  const at::NoGradGuard no_grad;
  boundary->enter(Call::offload_states, [&](comm::Close& own) {
    own.rounds = reducer ? reducer->rounds_begun() : 0;
    TORCH_CHECK_VALUE(optimizer && optimizer->states().are_away(), "reload_states: no states are offloaded");
  });
  saver->finish();
  boundary->together("bringing states back to memory", [&] {
    optimizer->states().bring_back();
    away.reset();
    optimizer->states().set_away(false);
  });
}

}  // namespace deeptide
