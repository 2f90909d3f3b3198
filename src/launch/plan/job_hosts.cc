// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Decides between this machine, agents and a starter.
#include "launch/plan/job_hosts.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <numeric>

#include "base/sha256.h"
#include "deeptide/discovery.h"
#include "launch/machine/machine.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

constexpr const char* kDefaultHostfile = "/job/hostfile";

bool uses_agents(const Options& options) {
  const Transport transport = options.transport.value_or(Transport::ssh);
  return transport == Transport::ssh || transport == Transport::pdsh;
}

std::string hostfile_of(const Options& options) {
  if (!options.hostfile.empty()) {
    if (!std::filesystem::exists(options.hostfile)) {
      throw UsageError("hostfile '" + options.hostfile + "' does not exist; omit -H to run on this machine");
    }
    return options.hostfile;
  }
  return std::filesystem::exists(kDefaultHostfile) ? kDefaultHostfile : "";
}

// Returns the first variable that limits the devices, or null.
const char* visible_variable() {
  for (const char* name : {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}) {
    if (std::getenv(name)) return name;
  }
  return nullptr;
}

// All ranks are on this machine.
void place_here(const Options& options, int num_ranks, JobHosts& job) {
  job.port = HeldPort::choose(options.master_port);
  job.place.num_ranks = job.place.world_size = num_ranks;
  job.place.master_port = job.port.number();
  if (!options.master_addr.empty()) job.place.master_addr = options.master_addr;
}

// Without a hostfile, --include and --exclude choose from this machine's devices.
void choose_devices(const Options& options, JobHosts& job) {
  if (options.filter.num_nodes > 1) {
    throw UsageError("--num_nodes " + std::to_string(options.filter.num_nodes) +
                     " needs a hostfile: give one with -H, or create " + kDefaultHostfile);
  }
  if (options.filter.include.empty() && options.filter.exclude.empty()) {
    place_here(options, resolve_num_ranks(options), job);
    return;
  }
  if (const char* name = visible_variable()) {
    job.warnings.push_back(std::string(name) + " is ignored: --include and --exclude choose the devices");
  }
  Host here{"localhost", std::vector<int>(std::max(1, count_devices("/dev", nullptr)))};
  std::iota(here.slots.begin(), here.slots.end(), 0);
  HostFilter filter = options.filter;
  filter.num_nodes = -1;
  const Host chosen = filter_hosts({here}, filter).front();
  place_here(options, static_cast<int>(chosen.slots.size()), job);
  job.place.devices = chosen.slots;
}

// --no_ssh: this host's ranks only. The user starts the other hosts with the same hostfile.
HostPlace own_part(const Options& options, const std::vector<Host>& hosts, HeldPort& port) {
  if (options.node_rank >= static_cast<int>(hosts.size())) {
    throw UsageError("--node_rank " + std::to_string(options.node_rank) + ": the job has " +
                     std::to_string(hosts.size()) + " hosts");
  }
  HostPlace place;
  place.node_rank = options.node_rank;
  place.num_nodes = static_cast<int>(hosts.size());
  place.first_rank = num_slots({hosts.begin(), hosts.begin() + options.node_rank});
  place.devices = hosts[options.node_rank].slots;
  place.num_ranks = static_cast<int>(place.devices.size());
  place.world_size = num_slots(hosts);
  place.master_addr = options.master_addr;
  place.master_port = options.master_port ? options.master_port : kDefaultPort;
  if (options.node_rank == 0) port = HeldPort::choose(place.master_port);
  return place;
}

void check_transport(const Options& options, const JobHosts& job) {
  if (options.transport == Transport::slurm || !job.hosts.empty()) return;
  throw UsageError("--launcher, --force_multi and --no_ssh need a hostfile: give one with -H, or create " +
                   std::string(kDefaultHostfile));
}

}  // namespace

bool has_hostfile(const Options& options) { return !hostfile_of(options).empty(); }

JobHosts find_hosts(const Options& options) {
  JobHosts job;
  const std::string path = hostfile_of(options);
  if (!path.empty()) job.hosts = filter_hosts(read_hostfile(path), options.filter);
  const bool starter = options.transport && !uses_agents(options);
  if (starter || options.force_multi || options.no_ssh || options.transport) check_transport(options, job);
  if (starter) {
    job.way = JobHosts::Way::starter;
  } else if (options.no_ssh) {
    job.place = own_part(options, job.hosts, job.port);
  } else if (options.elastic && job.hosts.empty()) {
    job.hosts = {{"localhost", std::vector<int>(resolve_num_ranks(options))}};
    std::iota(job.hosts[0].slots.begin(), job.hosts[0].slots.end(), 0);
    job.way = JobHosts::Way::agents;
  } else if (job.hosts.empty()) {
    choose_devices(options, job);
  } else if (job.hosts.size() > 1 || options.force_multi || options.elastic || !is_this_machine(job.hosts[0].name)) {
    job.way = JobHosts::Way::agents;
  } else {
    place_here(options, num_slots(job.hosts), job);
    job.place.devices = job.hosts[0].slots;
  }
  if (job.way == JobHosts::Way::here && !options.no_ssh) {
    job.place.environment["DEEPTIDE_JOB_TOKEN"] = random_hex(16);
    job.place.environment["DEEPTIDE_RESTART_COUNT"] = "0";
  }
  if (job.way == JobHosts::Way::here) {
    // The user's files apply on one machine too. The ranks inherit the environment, so add only what differs from it.
    for (const auto& [name, value] : exported_environment()) {
      const char* inherited = std::getenv(name.c_str());
      if (!inherited || value != inherited) job.place.environment.emplace(name, value);
    }
  }
  return job;
}

}  // namespace deeptide::launch
