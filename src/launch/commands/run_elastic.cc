// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide elastic`: prints the batch of a configuration's elasticity section, and the worlds that it allows.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>

#include "config/elasticity.h"
#include "launch/commands/commands.h"
#include "launch/system/command_line.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

std::string listed(const std::vector<int64_t>& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

// Version 0.2 needs the number of ranks, which a job's shell has in WORLD_SIZE.
int64_t world_of_environment() {
  const char* text = std::getenv("WORLD_SIZE");
  return text ? std::atoll(text) : 0;
}

}  // namespace

int run_elastic(const Arguments& arguments) {
  CLI::App app("Prints the global batch, the valid numbers of ranks and the micro-batch of an elasticity section.",
               "deeptide elastic");
  std::string path;
  int64_t world_size = 0;
  app.add_option("-c,--config", path, "Path of the ds_config.json")->required();
  app.add_option("-w,--world-size", world_size, "Number of ranks")->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  if (const auto code = parse_arguments(app, arguments)) return *code;
  const Config config = Config::from_file(path);
  if (!config.elasticity().enabled) throw UsageError(path + ": elasticity.enabled is not true; set it to plan a job");
  const int64_t current = world_size > 0 ? world_size : world_of_environment();
  // Only a world size given by option must be valid.
  const ElasticBatch batch = world_size > 0 ? config::elastic_batch(config.elasticity(), world_size)
                                            : config::elastic_batch_unchecked(config.elasticity(), current);
  std::printf("final_batch_size .... %lld\n", static_cast<long long>(batch.train));
  std::printf("valid_gpus .......... %s\n", listed(batch.valid_worlds).c_str());
  if (batch.micro == 0) return 0;
  const int64_t ranks = world_size > 0 ? world_size : current;
  std::printf("micro_batch_size .... %lld\n", static_cast<long long>(batch.micro));
  std::printf("accumulation_steps .. %lld\n", static_cast<long long>(batch.train / (batch.micro * ranks)));
  return 0;
}

}  // namespace deeptide::launch
