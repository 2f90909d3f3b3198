// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The `deeptide` command: runs a script or program as ranks on this machine.
#include <cstdio>
#include <exception>

#include "launch/options.h"
#include "launch/rank_plan.h"
#include "launch/supervisor.h"

namespace {

constexpr int kUsage = 2;
constexpr int kCannotStart = 126;

int run(int argc, char** argv) {
  using namespace deeptide::launch;
  const auto options = parse_options({argv + 1, argv + argc});
  if (!options) return 0;
  const auto plans = plan_ranks(*options);
  if (!options->dry_run) return Supervisor(*options).run(plans);
  for (const RankPlan& plan : plans) std::puts(to_shell(plan).c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const deeptide::launch::UsageError& error) {
    std::fprintf(stderr, "deeptide: %s\n", error.what());
    return kUsage;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "deeptide: %s\n", error.what());
    return kCannotStart;
  }
}
