// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide doctor`: examines this machine and the logins to the hosts of a hostfile, and prints the findings.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <future>

#include "launch/commands/commands.h"
#include "launch/commands/doctor.h"
#include "launch/plan/hostfile.h"
#include "launch/plan/options.h"
#include "launch/system/command_line.h"
#include "launch/system/machine.h"

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

}  // namespace

int run_doctor(const Arguments& arguments) {
  CLI::App app("Examines this machine and, with a hostfile, the login to each host. Returns 1 if any check fails.",
               "deeptide doctor");
  Options options;
  app.add_option("-H,--hostfile", options.hostfile, "File with one line 'NAME slots=N' per host");
  app.add_option("--ssh_port", options.ssh_port, "Port of ssh on the hosts")->check(CLI::Range(1, 65535));
  app.add_option("--launcher_args", options.launcher_args, "Extra arguments for ssh, quoted as one word");
  app.add_option("--venv_script", options.venv_script, "Script that each host's shell sources first");
  app.add_option("--python", options.python, "The Python interpreter to examine");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  const std::vector<Host> hosts = options.hostfile.empty() ? std::vector<Host>() : read_hostfile(options.hostfile);
  std::vector<Finding> findings = examine_machine(options.python.empty() ? find_python() : options.python);
  for (Finding& finding : examine_hosts(options, hosts)) findings.push_back(std::move(finding));
  bool failed = false;
  for (const Finding& finding : findings) {
    std::puts(to_line(finding).c_str());
    failed |= finding.verdict == Finding::Verdict::fail;
  }
  return failed ? 1 : 0;
}

}  // namespace deeptide::launch
