// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lets Python tests set and ask, by operators: torch.ops.simulated.
#include <torch/library.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "simulated/operators/backend.h"
#include "simulated/operators/collectives.h"

namespace deeptide::simulated {
namespace {

Schedule schedule_of(const std::string& name) {
  static constexpr const char* kNames[] = {"at_once", "random", "late", "late_default", "late_others"};
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) return static_cast<Schedule>(i);
  }
  TORCH_CHECK(false, "simulated.configure: no schedule '", name, "'");
}

Stuck stuck_of(const std::string& name) {
  static constexpr const char* kNames[] = {"never", "without a peer", "always"};
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) return static_cast<Stuck>(i);
  }
  TORCH_CHECK(false, "simulated.configure: collectives are not stuck '", name, "'");
}

void configure(const std::string& schedule, int64_t max_delay_us, int64_t seed, int64_t cap_bytes, bool check,
               bool guard_pinned, double compute, double to_device, double to_host, double link,
               int64_t workspace_bytes, bool warns_of_waits, const std::string& stuck, int64_t connections,
               bool pins_for_another, int64_t staged_bytes, bool kernels, int64_t patience_ms) {
  Settings settings;
  settings.schedule = schedule_of(schedule);
  settings.max_delay_us = static_cast<unsigned>(max_delay_us);
  settings.patience_ms = static_cast<unsigned>(patience_ms);
  settings.seed = static_cast<uint64_t>(seed);
  settings.cap_bytes = static_cast<size_t>(cap_bytes);
  settings.check = check;
  settings.guard_pinned = guard_pinned;
  settings.bandwidths = {compute, to_device, to_host, link};
  settings.workspace_bytes = static_cast<size_t>(workspace_bytes);
  settings.warns_of_waits = warns_of_waits;
  settings.collectives = stuck_of(stuck);
  settings.connections = static_cast<unsigned>(connections);
  settings.pins_for_another = pins_for_another;
  settings.kernels = kernels;
  settings.staged_bytes = static_cast<size_t>(staged_bytes);
  Machine::instance().configure(settings);
}

void seed(int64_t value) {
  auto generator = default_generator();
  std::lock_guard lock(generator.mutex());
  generator.set_current_seed(static_cast<uint64_t>(value));
}

/// The group's device tensors then travel by its CPU backend.
void attach_collectives(const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  group->setBackend(kSimulated, c10d::ProcessGroup::BackendType::CUSTOM,
                    make_collectives(group->getBackend(c10::kCPU)));
}

std::vector<std::tuple<std::string, int64_t, int64_t>> traffic() {
  std::vector<std::tuple<std::string, int64_t, int64_t>> all;
  for (const auto& [name, traffic] : Machine::instance().take_traffic()) {
    all.emplace_back(name, traffic.tasks, traffic.bytes);
  }
  return all;
}

void host_access(const at::Tensor& tensor, bool write) {
  with_torch_errors(
      [&] { Machine::instance().host_access(tensor.const_data_ptr(), tensor.nbytes(), write, "declared access"); });
}

}  // namespace

TORCH_LIBRARY(simulated, m) {
  m.def("configure", &configure);
  m.def("seed", &seed);
  m.def("attach_collectives", &attach_collectives);
  m.def("host_access", &host_access);
  m.def("traffic", &traffic);
  m.def("settle", [] { return Machine::instance().settle(); });
  m.def("host_waits", [] { return Machine::instance().host_waits(); });
  m.def("host_time_s", [] { return Machine::instance().host_time_s(); });
  m.def("tasks", [] { return static_cast<int64_t>(Machine::instance().stats().tasks); });
  m.def("events", &num_events);
  m.def("streams", [] { return static_cast<int64_t>(Machine::instance().stats().streams); });
  m.def("used_bytes", [] { return static_cast<int64_t>(Machine::instance().stats().used_bytes); });
  m.def("checked", [] { return static_cast<int64_t>(Machine::instance().stats().checked); });
}

}  // namespace deeptide::simulated
