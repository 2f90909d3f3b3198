// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// `deeptide elastic`: the batch that a configuration's elasticity section gives, and the worlds that suit it.
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

// Version 0.2 needs the number of ranks; a job's shell has it in WORLD_SIZE.
int64_t world_of_environment() {
  const char* text = std::getenv("WORLD_SIZE");
  return text ? std::atoll(text) : 0;
}

}  // namespace

int run_elastic(const Arguments& arguments) {
  CLI::App app("Prints the global batch, the numbers of ranks and the micro-batch that the elasticity section gives.",
               "deeptide elastic");
  std::string path;
  int64_t world_size = 0;
  app.add_option("-c,--config", path, "The ds_config.json")->required();
  app.add_option("-w,--world-size", world_size, "The number of ranks")->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  if (const auto code = parse_arguments(app, arguments)) return *code;
  const Config config = Config::from_file(path);
  if (!config.elasticity().enabled) throw UsageError(path + ": elasticity.enabled is not true; set it to plan a job");
  const int64_t current = world_size > 0 ? world_size : world_of_environment();
  // Only a world that was asked for by name has to be a valid one.
  const config::ElasticBatch batch = world_size > 0 ? config::elastic_batch(config.elasticity(), world_size)
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
