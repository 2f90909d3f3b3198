// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide agent`, which talks to its launcher over standard input and output, or connects back to it.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "launch/commands/commands.h"
#include "launch/job/agent.h"
#include "launch/process/keeper.h"
#include "launch/system/usage_error.h"
#include "launch/wire/pdsh_hub.h"

namespace deeptide::launch {

int run_agent(const Arguments& arguments) {
  CLI::App app{"Runs the ranks of one host; the launcher starts it.", "deeptide agent"};
  int port = 0, host_index = 0;
  app.add_option("--connect", port, "Connect to the launcher's port instead of using standard input and output")
      ->check(CLI::Range(1, 65535));
  app.add_option("--host-index", host_index, "This host's index in the launcher's list");
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::Success& answered) {
    return app.exit(answered, std::cout, std::cerr);
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  if (port == 0) {
    if (isatty(STDIN_FILENO)) throw UsageError("'deeptide agent' must be started by the launcher, not by hand");
    return run_kept([] { return Agent(STDIN_FILENO, STDOUT_FILENO).run(); });
  }
  return run_kept([=] {
    const int socket = connect_back(port, host_index);
    return Agent(socket, socket).run();
  });
}

}  // namespace deeptide::launch
