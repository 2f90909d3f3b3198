// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Builds the command lines of ssh, pdsh, mpirun and srun.
#include "launch/plan/host_commands.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "launch/machine/machine.h"
#include "launch/system/shell.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

using Words = std::vector<std::string>;

void append(Words& words, const Words& more) { words.insert(words.end(), more.begin(), more.end()); }

std::string join(const Words& words, const char* separator) {
  std::string joined;
  for (const std::string& word : words) joined += (joined.empty() ? "" : separator) + word;
  return joined;
}

Words host_names(const std::vector<Host>& hosts) {
  Words names;
  for (const Host& host : hosts) names.push_back(host.name);
  return names;
}

// `deeptide rank [options] script args`: the ranks' own options, then the user's command.
Words rank_command(const Options& options) {
  Words words = {own_path(), "rank"};
  append(words, to_words(options, {"--quiet"}));
  if (options.venv_script.empty()) return words;
  return {"bash", "-c", ". " + shell_quote(options.venv_script) + " && exec " + shell_join(words)};
}

void require_equal_slots(const std::vector<Host>& hosts, const std::string& name) {
  for (const Host& host : hosts) {
    if (host.slots.size() == hosts[0].slots.size()) continue;
    throw UsageError("--launcher " + name + " needs the same number of slots on each host: " + hosts[0].name + " has " +
                     std::to_string(hosts[0].slots.size()) + ", " + host.name + " has " +
                     std::to_string(host.slots.size()) + "; use --num_gpus, or --launcher ssh");
  }
}

// Starters number the slots themselves and would silently ignore a choice of particular slots.
void require_first_slots(const std::vector<Host>& hosts, const std::string& name) {
  for (const Host& host : hosts) {
    if (host.slots.empty() || host.slots.back() == static_cast<int>(host.slots.size()) - 1) continue;
    throw UsageError("--launcher " + name + " cannot choose slots " + join_numbers(host.slots) + " of " + host.name +
                     ", only the first slots; use --launcher ssh");
  }
}

Words openmpi_command(const Options& options, const std::vector<Host>& hosts, const Words& exported) {
  Words slots;
  for (const Host& host : hosts) slots.push_back(host.name + ":" + std::to_string(host.slots.size()));
  const Words user = shell_split(options.launcher_args, "--launcher_args");
  Words words = {"mpirun", "-n", std::to_string(num_slots(hosts)), "--host", join(slots, ","), "--bind-to", "none"};
  append(words, user);
  for (const std::string& name : exported) append(words, {"-x", name});
  return words;
}

// MPICH's and Intel's Hydra take the same options.
Words hydra_command(const Options& options, const std::vector<Host>& hosts, const Words& exported,
                    const std::string& name) {
  require_equal_slots(hosts, name);
  Words words = {"mpirun",
                 "-n",
                 std::to_string(num_slots(hosts)),
                 "-ppn",
                 std::to_string(hosts[0].slots.size()),
                 "-hosts",
                 join(host_names(hosts), ",")};
  if (name == "impi") append(words, {"-genv", "I_MPI_PIN", "0"});  // the ranks bind themselves
  append(words, shell_split(options.launcher_args, "--launcher_args"));
  if (!exported.empty()) append(words, {"-genvlist", join(exported, ",")});
  return words;
}

Words slurm_command(const Options& options, const std::vector<Host>& hosts, const Words& exported) {
  // Without --disable-status a first ^C would only make srun print its status.
  Words words = {"srun", "--kill-on-bad-exit=1", "--disable-status"};
  // srun inherits all options of an allocation except this one.
  if (const char* cores = std::getenv("SLURM_CPUS_PER_TASK")) words.push_back(std::string("--cpus-per-task=") + cores);
  if (!hosts.empty()) {
    require_equal_slots(hosts, "slurm");
    append(words, {"-n", std::to_string(num_slots(hosts)), "--nodes", std::to_string(hosts.size()), "--ntasks-per-node",
                   std::to_string(hosts[0].slots.size()), "--nodelist", join(host_names(hosts), ",")});
  } else {
    if (options.filter.num_nodes > 0) append(words, {"--nodes", std::to_string(options.filter.num_nodes)});
    if (options.num_ranks > 0) append(words, {"--ntasks-per-node", std::to_string(options.num_ranks)});
  }
  append(words, shell_split(options.launcher_args, "--launcher_args"));
  words.push_back("--export=" + join(exported.empty() ? Words{"ALL"} : Words{"ALL", join(exported, ",")}, ","));
  return words;
}

}  // namespace

std::string require_program(const std::string& program, const std::string& launcher) {
  const std::string path = find_program(program);
  if (!path.empty()) return path;
  throw UsageError("--launcher " + launcher + " needs '" + program + "', which is not in PATH; install it, or use " +
                   (launcher == "ssh" ? "--no_ssh on each host" : "--launcher ssh, which needs only ssh"));
}

Words ssh_command(const Options& options, const std::string& host, const std::string& remote) {
  Words words = {"ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5"};
  if (options.ssh_port > 0) append(words, {"-p", std::to_string(options.ssh_port)});
  append(words, shell_split(options.launcher_args, "--launcher_args"));
  append(words, {"--", host, remote});
  return words;
}

std::string own_path() {
  std::error_code error;
  const auto path = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? "deeptide" : path.string();
}

std::string remote_line(const Options& options, const std::string& arguments) {
  const std::string here = shell_quote(own_path());
  const std::string become = "[ -x " + here + " ] && exec " + here + " " + arguments + "; exec deeptide " + arguments;
  if (options.venv_script.empty()) return "sh -c " + shell_quote(become);
  return "bash -c " + shell_quote(". " + shell_quote(options.venv_script) + " || exit; " + become);
}

Words agent_command(const Options& options, const std::string& host) {
  if (host == "localhost" && !options.force_multi) {
    if (options.venv_script.empty()) return {own_path(), "agent"};
    return {"/bin/sh", "-c", "exec " + remote_line(options, "agent")};
  }
  return ssh_command(options, host, remote_line(options, "agent"));
}

Words pdsh_command(const Options& options, const std::vector<Host>& hosts, int port) {
  Words words = {"pdsh", "-S", "-f", "1024", "-R", "ssh", "-w", join(host_names(hosts), ",")};
  append(words, shell_split(options.launcher_args, "--launcher_args"));
  // pdsh replaces %n by the host's place in its list, from 0.
  words.push_back(remote_line(options, "agent --connect " + std::to_string(port) + " --host-index %n"));
  return words;
}

Words starter_command(const Options& options, const std::vector<Host>& hosts, const Words& exported) {
  Words words;
  switch (options.transport.value_or(Transport::ssh)) {
    case Transport::openmpi:
      require_first_slots(hosts, "openmpi");
      words = openmpi_command(options, hosts, exported);
      break;
    case Transport::mpich:
      require_first_slots(hosts, "mpich");
      words = hydra_command(options, hosts, exported, "mpich");
      break;
    case Transport::impi:
      require_first_slots(hosts, "impi");
      words = hydra_command(options, hosts, exported, "impi");
      break;
    default:
      words = slurm_command(options, hosts, exported);
  }
  append(words, rank_command(options));
  return words;
}

namespace {

// Appends our port to a variable that holds ssh's options.
void add_ssh_port(Environment& environment, const char* name, int port) {
  if (port == 0) return;
  const char* users = std::getenv(name);
  environment[name] = (users ? std::string(users) + " " : "") + "-p " + std::to_string(port);
}

}  // namespace

Environment starter_environment(const Options& options) {
  Environment environment;
  switch (options.transport.value_or(Transport::ssh)) {
    case Transport::pdsh:
      environment["PDSH_RCMD_TYPE"] = "ssh";
      environment["PDSH_SSH_ARGS_APPEND"] = "-o BatchMode=yes -o ConnectTimeout=10";
      if (const char* users = std::getenv("PDSH_SSH_ARGS_APPEND")) {
        environment["PDSH_SSH_ARGS_APPEND"] += std::string(" ") + users;
      }
      if (options.ssh_port > 0) environment["PDSH_SSH_ARGS_APPEND"] += " -p " + std::to_string(options.ssh_port);
      break;
    case Transport::openmpi:
      add_ssh_port(environment, "OMPI_MCA_plm_rsh_args", options.ssh_port);
      break;
    case Transport::mpich:
      add_ssh_port(environment, "HYDRA_LAUNCHER_EXTRA_ARGS", options.ssh_port);
      break;
    case Transport::impi:
      add_ssh_port(environment, "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS", options.ssh_port);
      break;
    default:
      break;
  }
  return environment;
}

}  // namespace deeptide::launch
