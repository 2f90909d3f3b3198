// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide doctor`: examines this machine and the logins to the hosts of a hostfile, and prints the findings.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <future>

#include "launch/commands/commands.h"
#include "launch/commands/doctor/doctor.h"
#include "launch/machine/machine.h"
#include "launch/machine/python_module.h"
#include "launch/plan/host_commands.h"
#include "launch/plan/hostfile.h"
#include "launch/plan/options.h"
#include "launch/system/command_line.h"
#include "launch/system/terminal.h"
#include "launch/system/usage_error.h"
#include "launch/watch/job_socket.h"

namespace deeptide::launch {
namespace {

constexpr size_t kLoginsAtOnce = 32;

// Returns one finding per host, in the order of the hostfile.
std::vector<Finding> examine_hosts(const Options& options, const std::vector<Host>& hosts) {
  std::vector<Finding> findings;
  for (size_t first = 0; first < hosts.size(); first += kLoginsAtOnce) {
    std::vector<std::future<Finding>> logins;
    for (size_t i = first; i < std::min(first + kLoginsAtOnce, hosts.size()); ++i) {
      logins.push_back(std::async(std::launch::async, [&, i] { return examine_host(options, hosts[i].name); }));
    }
    for (auto& login : logins) findings.push_back(login.get());
  }
  return findings;
}

/// The options by which a job finds its hosts.
Arguments words_of_hosts(const Options& options) {
  if (options.hostfile.empty()) return {};
  Arguments words{"--hostfile", options.hostfile};
  if (options.ssh_port != 0) words.insert(words.end(), {"--ssh_port", std::to_string(options.ssh_port)});
  // One word, as it begins with '-' itself.
  if (!options.launcher_args.empty()) words.push_back("--launcher_args=" + options.launcher_args);
  if (!options.venv_script.empty()) words.insert(words.end(), {"--venv_script", options.venv_script});
  return words;
}

/// Sets a job's steps against this machine. Returns only if it cannot.
int examine_job(const std::string& job, const std::string& python, Arguments rest) {
  if (!std::filesystem::exists(job)) find_job(job);  // its error lists the live ones
  Arguments words{job, "--launcher", own_path()};
  words.insert(words.end(), rest.begin(), rest.end());
  become_module("deeptide._commands.doctor", words, python);
}

}  // namespace

int run_doctor(const Arguments& arguments) {
  CLI::App app(
      "Examines this machine and, with a hostfile, the login to each host. Returns 1 if any check fails. With a job, "
      "sets what its steps take against what this machine does, and names what limits it.",
      "deeptide doctor");
  Options options;
  std::string job, folder;
  bool pause = false;
  app.add_option("job", job,
                 "A live job's id from 'deeptide ps', or the folder of a run that deeptide.jsonl_monitor recorded");
  app.add_option("--folder", folder, "With a job: measure the drive of this folder, such as its nvme_path");
  app.add_flag("--pause", pause, "With a live job: stop its ranks while the machine is measured, some ten seconds");
  app.add_option("-H,--hostfile", options.hostfile,
                 "File with one line 'NAME slots=N' per host; with a job: its own, whose hosts are measured together");
  app.add_option("--ssh_port", options.ssh_port, "Port of ssh on the hosts")->check(CLI::Range(1, 65535));
  app.add_option("--launcher_args", options.launcher_args, "Extra arguments for ssh, quoted as one word");
  app.add_option("--venv_script", options.venv_script, "Script that each host's shell sources first");
  app.add_option("--python", options.python, "The Python interpreter to examine");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  if (!job.empty()) {
    Arguments rest;
    if (!folder.empty()) rest.insert(rest.end(), {"--folder", folder});
    if (pause) rest.emplace_back("--pause");
    for (const std::string& word : words_of_hosts(options)) rest.push_back(word);
    return examine_job(job, options.python, rest);
  }
  if (pause || !folder.empty()) throw UsageError("deeptide doctor: --pause and --folder need a job; name one");
  const std::vector<Host> hosts = options.hostfile.empty() ? std::vector<Host>() : read_hostfile(options.hostfile);
  std::vector<Finding> findings = examine_machine(options.python.empty() ? find_python() : options.python);
  for (Finding& finding : examine_hosts(options, hosts)) findings.push_back(std::move(finding));
  const size_t width = terminal_size().columns;
  bool failed = false;
  for (const Finding& finding : findings) {
    const std::string line = to_line(finding);
    std::puts(width == 0 ? line.c_str() : (line.substr(0, 6) + wrapped(line.substr(6), width, 6, 6)).c_str());
    failed |= finding.verdict == Finding::Verdict::fail;
  }
  return failed ? 1 : 0;
}

}  // namespace deeptide::launch
