// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs attempts one after the other; each attempt tries all hosts again.
#include "launch/job/coordinator.h"

#include <unistd.h>

#include <algorithm>

#include "launch/job/job_attempt.h"
#include "launch/plan/elastic_hosts.h"

namespace deeptide::launch {
int run_over_agents(const Options& options, const std::vector<Host>& hosts) {
  const SignalFile signals;
  JobOutput output(options);
  HangWatch watch(options, getpid(), [&output](const std::string& text) { output.say(LogLevel::error, text); });
  const size_t fewest = options.elastic ? std::max(1, options.min_elastic_nodes) : hosts.size();
  AttemptContext context{options, signals, output, watch, 0, fewest, [&options](const std::vector<Host>& reached) {
                           return options.elastic ? elastic_hosts(options, reached) : reached;
                         }};
  while (true) {
    const AttemptResult result = JobAttempt(context, hosts).run();
    const bool again = options.elastic && result.restartable && context.restarts < options.max_restarts;
    if (again) {
      ++context.restarts;
      output.say(LogLevel::warning,
                 "restart " + std::to_string(context.restarts) + " of at most " + std::to_string(options.max_restarts));
      output.forget_ranks();
      continue;
    }
    output.flush();
    return result.exit_code;
  }
}

}  // namespace deeptide::launch
