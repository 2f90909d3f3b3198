// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes docs/config.md and docs/ds_config.schema.json from the table: write_config_docs <docs folder>.
#include <cstdio>
#include <fstream>
#include <string>

#include "deeptide/config.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s <docs folder>\n", argv[0]);
    return 2;
  }
  const std::string folder = argv[1];
  std::ofstream page(folder + "/config.md"), schema(folder + "/ds_config.schema.json");
  page << deeptide::config_markdown() << std::flush;
  schema << deeptide::config_json_schema() << std::flush;
  if (page && schema) return 0;
  std::fprintf(stderr, "cannot write to %s\n", folder.c_str());
  return 1;
}
