// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// `deeptide bench`: what it can measure, and `bench io`.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "launch/command_line.h"
#include "launch/io_bench.h"
#include "launch/options.h"

namespace deeptide::launch {

int run_bench_io(const Arguments& arguments) {
  CLI::App app("Writes (or reads) a file in each thread with O_DIRECT and prints the best loop's bandwidth.",
               "deeptide bench io");
  IoBench bench;
  std::string io_size = "400M", block_size = "1M";
  app.add_option("--folder", bench.folder, "Where the files go")->required();
  app.add_option("--io_size", io_size, "Of each thread's file")->capture_default_str();
  app.add_option("--block_size", block_size, "Of one request")->capture_default_str();
  app.add_option("--io_parallel", bench.num_threads, "Threads, each with a file of its own")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--loops", bench.num_loops, "The best counts")->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_flag("--read", bench.read, "Read instead of write");
  app.add_flag("--validate", bench.validate, "Compare what is read with what was written")->needs("--read");
  if (const auto code = parse_arguments(app, arguments)) return *code;
  bench.io_bytes = parse_size(io_size);
  bench.block_bytes = parse_size(block_size);
  const IoResult result = run_io_bench(bench);
  std::printf("%s: %.2f GB/s (%d threads, blocks of %s, best of %d)%s\n", bench.read ? "read" : "write",
              result.gb_per_s(), bench.num_threads, block_size.c_str(), bench.num_loops,
              result.direct ? "" : "; no O_DIRECT in this folder: the page cache flatters this figure");
  return 0;
}

int run_bench(const Arguments& arguments) {
  const std::string what = arguments.empty() ? "" : arguments[0];
  if (what == "comm") return run_bench_comm({arguments.begin() + 1, arguments.end()});
  if (what == "io") return run_bench_io({arguments.begin() + 1, arguments.end()});
  if (what == "--help" || what == "-h") {
    std::puts(
        "Usage: deeptide bench comm [OPTIONS]\n       deeptide bench io --folder PATH [OPTIONS]\n\n"
        "  comm  how fast ranks exchange and sum tensors\n  io    how fast a folder's device writes and reads");
    return 0;
  }
  throw UsageError("deeptide bench: got " + (what.empty() ? "nothing" : "'" + what + "'") +
                   ", expected what to measure: comm or io");
}

}  // namespace deeptide::launch
