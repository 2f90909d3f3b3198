// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A user's program: reads a configuration through the installed package.
#include <deeptide/config.h>
#include <deeptide/version.h>

#include <cstdio>
#include <string>

int main() {
  if (deeptide::version() != std::string(DEEPTIDE_VERSION)) return 1;
  const auto config = deeptide::Config::from_text(
      R"({"train_batch_size": 8, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 3}})");
  std::printf("stage %d, micro-batch %d\n", config.zero().stage, static_cast<int>(config.batch_sizes(2).micro));
  return 0;
}
