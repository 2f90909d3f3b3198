// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide ssh`: a command on all hosts at once, with the host's name before each line of output.
#include <signal.h>

#include <CLI/CLI.hpp>

#include "launch/commands/commands.h"
#include "launch/output/job_output.h"
#include "launch/plan/host_commands.h"
#include "launch/plan/hostfile.h"
#include "launch/plan/options.h"
#include "launch/process/process_group.h"
#include "launch/system/command_line.h"
#include "launch/system/shell.h"
#include "launch/system/signal_file.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

constexpr double kGrace_s = 5.0;

// Returns the words after the options as one shell line. A single word already is such a line.
std::string remote_command(const std::vector<std::string>& words) {
  return words.size() == 1 ? words[0] : shell_join(words);
}

bool parse(const Arguments& arguments, Options& options) {
  CLI::App app{"Runs a command on every host of the hostfile. Returns the exit code of the first host that failed.",
               "deeptide ssh"};
  set_usage(app, "deeptide ssh [OPTIONS] command [arguments...]");
  app.prefix_command();
  options.hostfile = "/job/hostfile";
  app.add_option("-H,-f,--hostfile", options.hostfile, "File with one line 'NAME slots=N' per host")
      ->capture_default_str();
  app.add_option("-i,--include", options.filter.include, "Use only these hosts, joined by '@'");
  app.add_option("-e,--exclude", options.filter.exclude, "Use all but these hosts");
  app.add_option("--num_nodes", options.filter.num_nodes, "Use only the first N hosts")->check(CLI::Range(1, 65536));
  app.add_option("--ssh_port", options.ssh_port, "Port of ssh on the hosts")->check(CLI::Range(1, 65535));
  app.add_option("--launcher_args", options.launcher_args, "Extra arguments for ssh, quoted as one word");
  if (parse_arguments(app, arguments)) return false;
  options.command = app.remaining();
  if (options.command.empty()) throw UsageError("no command given; usage: deeptide ssh [options] command...");
  if (options.command[0].starts_with('-')) throw UsageError("unknown option '" + options.command[0] + "'");
  return true;
}

int first_failure(const ProcessGroup& group) {
  for (const auto& member : group.members()) {
    if (member->process.status()->failed()) return member->process.status()->exit_code();
  }
  return 0;
}

}  // namespace

int run_ssh(const Arguments& arguments) {
  Options options;
  if (!parse(arguments, options)) return 0;
  const auto hosts = filter_hosts(read_hostfile(options.hostfile), options.filter);
  const std::string ssh = require_program("ssh", "ssh");
  const SignalFile signals;
  JobOutput output(options);
  ProcessGroup group({[&](const auto& member, Stream stream, auto bytes) { output.feed(member.id, stream, bytes); },
                      [&](const auto& member) {
                        const ExitStatus& status = *member.process.status();
                        if (status.failed()) output.say(LogLevel::error, hosts[member.id].name + ": " + status.text());
                      }});
  for (size_t i = 0; i < hosts.size(); ++i) {
    Command command{.words = ssh_command(options, hosts[i].name, remote_command(options.command))};
    command.words[0] = ssh;
    output.add_rank(static_cast<int>(i), "[" + hosts[i].name + "] ", false);
    group.start_program(static_cast<int>(i), command, Terminal{});
  }
  std::optional<int> stopped;
  while (!group.all_ended()) {
    PollSet set;
    set.add(signals.fd(), POLLIN, [&] {
      for (int signal : signals.read()) {
        if (signal == SIGCHLD) {
          group.reap();
        } else if (stopped) {
          group.kill();
        } else {
          stopped = signal;
          group.stop(SIGTERM, kGrace_s);
        }
      }
    });
    group.add_to(set, !output.full());
    output.add_to(set);
    set.wait();
    group.check_deadline();
  }
  group.finish();
  output.finish();
  output.flush();
  return stopped ? 128 + *stopped : first_failure(group);
}

}  // namespace deeptide::launch
