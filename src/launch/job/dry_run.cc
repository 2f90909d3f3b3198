// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Prints --dry-run of a job over several hosts as shell lines, with the contents of messages to agents as comments.
#include "launch/job/dry_run.h"

#include <cstdio>
#include <filesystem>

#include "deeptide/discovery.h"
#include "launch/job/starter.h"
#include "launch/output/failure_report.h"
#include "launch/plan/exports.h"
#include "launch/plan/host_commands.h"
#include "launch/plan/rank_plan.h"
#include "launch/system/shell.h"

namespace deeptide::launch {
namespace {

void print(const std::string& line) { std::puts(line.c_str()); }

// Prefixes every line, so that a line break within a value does not end the comment.
std::string as_comment(const std::string& text) {
  std::string comment = "#   ";
  for (char c : text) {
    comment += c;
    if (c == '\n') comment += "#   ";
  }
  return comment;
}

}  // namespace

int print_agents(const Options& options, const std::vector<Host>& hosts) {
  HostPlace place;
  place.num_nodes = static_cast<int>(hosts.size());
  place.world_size = num_slots(hosts);
  place.master_addr = options.master_addr;
  // In a real job the first host's agent reports it.
  if (options.master_addr.empty()) place.master_addr = hosts.size() == 1 ? "127.0.0.1" : "ADDRESS-OF-" + hosts[0].name;
  place.master_port = options.master_port ? options.master_port : kDefaultPort;
  place.environment = exported_environment();
  if (options.transport == Transport::pdsh) {
    std::string line;
    for (const auto& [name, value] : starter_environment(options)) line += name + "=" + shell_quote(value) + " ";
    print(line + shell_join(pdsh_command(options, hosts, 0)));
  }
  for (const Host& host : hosts) {
    place.devices = host.slots;
    place.num_ranks = static_cast<int>(host.slots.size());
    const int last = place.first_rank + place.num_ranks - 1;
    print("# " + host.name + ": slots " + join_numbers(host.slots) + ", ranks " + std::to_string(place.first_rank) +
          "-" + std::to_string(last));
    if (options.transport != Transport::pdsh) print(shell_join(agent_command(options, host.name)));
    print(as_comment("cd " + shell_quote(std::filesystem::current_path().string())));
    for (const RankPlan& plan : plan_ranks(options, place, false)) print(as_comment(to_shell(plan.command)));
    place.first_rank += place.num_ranks;
    ++place.node_rank;
  }
  return 0;
}

int print_starter(const Options& options, const std::vector<Host>& hosts) {
  const Starter starter = make_starter(options, hosts, false);
  std::string line;
  for (const auto& [name, value] : starter.environment) {
    if (!is_secret(name)) line += name + "=" + shell_quote(value) + " ";
  }
  print(line + shell_join(starter.command));
  return 0;
}

}  // namespace deeptide::launch
