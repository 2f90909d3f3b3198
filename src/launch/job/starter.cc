// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs jobs through mpirun or srun: chooses the rendezvous and leaves the rest of each rank's place to the starter.
#include "launch/job/starter.h"

#include <cstdlib>
#include <sstream>

#include "base/sha256.h"
#include "base/slurm_lists.h"
#include "deeptide/discovery.h"
#include "launch/job/supervisor.h"
#include "launch/machine/machine.h"
#include "launch/plan/host_commands.h"
#include "launch/system/child_output.h"
#include "launch/system/shell.h"
#include "launch/system/usage_error.h"
#include "launch/wire/rank_hub.h"

namespace deeptide::launch {
namespace {

constexpr double kAnswerLimit_s = 15.0;

std::string master_address(const Options& options, const std::vector<Host>& hosts, bool look) {
  if (!options.master_addr.empty()) return options.master_addr;
  if (hosts.empty())
    return first_of_node_list(std::getenv("SLURM_JOB_NODELIST") ? std::getenv("SLURM_JOB_NODELIST") : "");
  const std::string& first = hosts[0].name;
  if (hosts.size() == 1 && (first == "localhost" || (look && is_this_machine(first)))) return "127.0.0.1";
  if (options.transport == Transport::slurm) return first;  // every host knows SLURM's names
  if (!look) return "ADDRESS-OF-" + first;
  if (is_this_machine(first)) {
    const auto addresses = own_addresses();
    if (!addresses.empty()) return addresses.front();
  }
  Options plain = options;
  plain.launcher_args.clear();  // they are for the starter
  auto command = ssh_command(plain, first, "hostname -I");
  command[0] = require_program("ssh", "ssh");
  // Errors go to the terminal, because they explain a missing answer.
  std::istringstream answer(run_child(command, kAnswerLimit_s, ChildErrors::inherited).text);
  std::string address;
  if (answer >> address) return address;
  throw UsageError("host " + first + " did not report its address (ssh " + first + " hostname -I); give --master_addr");
}

std::string program_of(Transport transport) { return transport == Transport::slurm ? "srun" : "mpirun"; }

const char* name_of(Transport transport) {
  switch (transport) {
    case Transport::openmpi:
      return "openmpi";
    case Transport::mpich:
      return "mpich";
    case Transport::impi:
      return "impi";
    default:
      return "slurm";
  }
}

}  // namespace

Starter make_starter(const Options& options, const std::vector<Host>& hosts, bool look, const std::string& hub) {
  starter_command(options, hosts, {});  // reports errors before any host is queried
  Starter starter;
  Environment& environment = starter.environment;
  environment = exported_environment();
  const std::string address = master_address(options, hosts, look);
  if (!address.empty()) environment["MASTER_ADDR"] = address;
  const bool here = address == "127.0.0.1";
  int port = options.master_port ? options.master_port : kDefaultPort;
  if (here && !options.master_port) {
    starter.port = HeldPort::first_free(port);
    port = starter.port.number();
  }
  environment["MASTER_PORT"] = std::to_string(port);
  if (look) environment["DEEPTIDE_JOB_TOKEN"] = random_hex(16);
  if (!hub.empty()) environment[kHubVariable] = hub;
  std::vector<std::string> exported;
  for (const auto& [name, value] : environment) exported.push_back(name);
  if (!look) exported.insert(exported.end(), {kHubVariable, "DEEPTIDE_JOB_TOKEN"});
  starter.command = starter_command(options, hosts, exported);
  for (const auto& [name, value] : starter_environment(options)) environment[name] = value;
  return starter;
}

int run_starter(const Options& options, const std::vector<Host>& hosts) {
  const Transport transport = *options.transport;
  const std::string program = require_program(program_of(transport), name_of(transport));
  RankHub hub(hosts);
  const Starter starter = make_starter(options, hosts, true, hub.address());
  Command command{.words = starter.command, .environment = starter.environment, .starts_ranks = true};
  command.words[0] = program;
  Options own = options;
  own.log_dir.clear();  // each rank writes its log on its own host
  return Supervisor(own).run_program(command, program_of(transport), hub);
}

}  // namespace deeptide::launch
