// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide bench io`: parses the options and prints the result.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>

#include "launch/commands/bench/io_bench.h"
#include "launch/commands/commands.h"
#include "launch/system/command_line.h"

namespace deeptide::launch {
namespace {

const std::map<std::string, IoEngine> kEngines{
    {"auto", IoEngine::automatic}, {"io_uring", IoEngine::io_uring}, {"threads", IoEngine::threads}};

void print(const IoBench& bench, const IoResult& result, const std::string& block_size) {
  if (!result.obstacle.empty()) std::printf("io_uring is not available (%s): using threads\n", result.obstacle.c_str());
  const char* note = !bench.direct    ? "; through the page cache"
                     : !result.direct ? "; this folder has no O_DIRECT: the page cache inflates this figure"
                                      : "";
  std::printf("%s: %.2f GB/s (%s, %d files, %d requests of %s in each, best of %d)%s\n", bench.read ? "read" : "write",
              result.gb_per_s(), result.engine == IoEngine::io_uring ? "io_uring" : "threads", bench.num_files,
              bench.queue_depth, block_size.c_str(), bench.num_loops, note);
}

}  // namespace

int run_bench_io(const Arguments& arguments) {
  CLI::App app("Writes (or reads) files past the page cache and prints the best loop's bandwidth.",
               "deeptide bench io");
  IoBench bench;
  std::string io_size = "400M", block_size = "1M";
  bool buffered = false;
  app.add_option("--folder", bench.folder, "Folder to write the files to")->required();
  app.add_option("--engine", bench.engine, "io_uring, threads, or auto: io_uring if it is available")
      ->transform(CLI::CheckedTransformer(kEngines))
      ->option_text("NAME=auto");
  app.add_option("--io_size", io_size, "Size of each file")->option_text("SIZE=400M");
  app.add_option("--block_size", block_size, "Size of one request")->option_text("SIZE=1M");
  app.add_option("--queue_depth", bench.queue_depth, "Requests in flight per file; with threads, threads per file")
      ->check(CLI::Range(1, 1024))
      ->option_text("N=32");
  app.add_option("--io_parallel", bench.num_files, "Files in parallel, one thread per file")
      ->check(CLI::Range(1, 256))
      ->option_text("N=4");
  app.add_option("--loops", bench.num_loops, "Passes over the files; the best is reported")
      ->check(CLI::Range(1, 1000))
      ->option_text("N=3");
  app.add_flag("--read", bench.read, "Read instead of write");
  app.add_flag("--validate", bench.validate, "Compare the data read with the data written")->needs("--read");
  app.add_flag("--buffered", buffered, "Use the page cache, not O_DIRECT");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  bench.direct = !buffered;
  bench.io_bytes = parse_size(io_size);
  bench.block_bytes = parse_size(block_size);
  print(bench, run_io_bench(bench), block_size);
  return 0;
}

}  // namespace deeptide::launch
