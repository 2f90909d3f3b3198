// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide bench comm`: a job whose ranks time collectives. Takes its own options and those of any job.
#include <CLI/CLI.hpp>
#include <array>
#include <charconv>
#include <map>

#include "launch/commands/bench/io_bench.h"
#include "launch/commands/commands.h"
#include "launch/machine/machine.h"
#include "launch/plan/job_hosts.h"
#include "launch/plan/options.h"
#include "launch/system/command_line.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

constexpr const char* kWorker = "deeptide._commands.bench_comm";
constexpr int64_t kLargest = int64_t{1} << 40;

constexpr const char* kBenchFooter = R"(
Accepts all job options as well (deeptide --help): --num_ranks, -H, --include, --launcher, --python, ...
Without a hostfile or GPUs it starts 2 ranks on this machine. Every result is checked once before it is timed.

Size: the bytes that each rank receives (all-gather) or contributes (all others).
Bandwidths use the median time, as in nccl-tests. Algorithm bandwidth is size / time. Bus bandwidth is algorithm
bandwidth times (n - 1) / n; times 2 (n - 1) / n for all-reduce; times 1 for broadcast.)";

const std::array<const char*, 5> kCollectives{"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast"};

// ds_bench uses torch's names of types.
const std::map<std::string, std::string> kTypes{
    {"fp32", "fp32"},          {"bf16", "bf16"},           {"fp16", "fp16"},
    {"float32", "fp32"},       {"bfloat16", "bf16"},       {"float16", "fp16"},
    {"torch.float32", "fp32"}, {"torch.bfloat16", "bf16"}, {"torch.float16", "fp16"},
};

struct CommBench {
  std::array<bool, kCollectives.size()> chosen{};  // none chosen: all
  std::string min_size = "4K", max_size = "64M";
  bool scan = false;
  int trials = 10;
  int warmups = 3;
  std::string type = "fp32";
  std::string unit = "GBps";
  bool raw = false, json = false, c10d = false;
};

void declare(CLI::App& app, CommBench& bench) {
  app.footer(kBenchFooter);
  app.allow_extras();  // the options of the job
  for (size_t i = 0; i < kCollectives.size(); ++i) {
    app.add_flag("--" + std::string(kCollectives[i]), bench.chosen[i], "Time this collective (default: all)");
  }
  app.add_option("--minsize", bench.min_size, "Smallest size, in bytes or with K, M or G")->option_text("SIZE=4K");
  app.add_option("--maxsize", bench.max_size, "Largest size; a number below 64 is an exponent of two, as in ds_bench")
      ->option_text("SIZE=64M");
  app.add_flag("--scan", bench.scan, "Use every power of two between them, not every second one");
  app.add_option("--trials", bench.trials, "Timed trials per size; each makes calls worth 16 MiB, at most 200")
      ->check(CLI::Range(1, 100'000))
      ->option_text("N=10");
  app.add_option("--warmups", bench.warmups, "Untimed calls before the trials")
      ->check(CLI::Range(0, 100'000))
      ->option_text("N=3");
  app.add_option("--dtype", bench.type, "fp32, bf16 or fp16")
      ->transform(CLI::Transformer(kTypes))
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->option_text("TYPE=fp32");
  app.add_option("--bw-unit", bench.unit, "GBps or Gbps")
      ->check(CLI::IsMember({"GBps", "Gbps"}))
      ->option_text("UNIT=GBps");
  auto* raw = app.add_flag("--raw", bench.raw, "Print numbers without units, in bytes and microseconds");
  app.add_flag("--json", bench.json, "Print one JSON object per line instead of a table")->excludes(raw);
  app.add_flag("--c10d", bench.c10d, "Use c10d everywhere, even between ranks that share memory");
}

int64_t size_of(const std::string& text) {
  int power = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), power);
  const bool is_power = error == std::errc() && end == text.data() + text.size() && power > 0 && power < 64;
  const int64_t bytes = is_power ? int64_t{1} << std::min(power, 62) : parse_size(text);
  if (bytes <= kLargest) return bytes;
  throw UsageError("invalid size '" + text + "': expected at most 1024G");
}

std::string sizes_of(const CommBench& bench) {
  const int64_t smallest = size_of(bench.min_size), largest = size_of(bench.max_size);
  if (smallest > largest) {
    throw UsageError("--minsize " + bench.min_size + " is above --maxsize " + bench.max_size);
  }
  std::string text;
  for (int64_t bytes = smallest; bytes < largest; bytes *= bench.scan ? 2 : 4) text += std::to_string(bytes) + ",";
  return text + std::to_string(largest);
}

std::string collectives_of(const CommBench& bench) {
  const bool all = bench.chosen == std::array<bool, kCollectives.size()>{};
  std::string text;
  for (size_t i = 0; i < kCollectives.size(); ++i) {
    if (all || bench.chosen[i]) text += (text.empty() ? "" : ",") + std::string(kCollectives[i]);
  }
  return text;
}

Arguments worker_arguments(const CommBench& bench) {
  Arguments words{"--module",      kWorker,
                  "--collectives", collectives_of(bench),
                  "--sizes",       sizes_of(bench),
                  "--dtype",       bench.type,
                  "--trials",      std::to_string(bench.trials),
                  "--warmups",     std::to_string(bench.warmups),
                  "--bw-unit",     bench.unit,
                  "--format",      bench.json ? "json" : bench.raw ? "raw" : "table"};
  if (bench.c10d) words.push_back("--no-shared-memory");
  return words;
}

}  // namespace

int run_bench_comm(const Arguments& arguments) {
  CLI::App app("Times collectives between the ranks of a job.", "deeptide bench comm");
  CommBench bench;
  declare(app, bench);
  if (const auto code = parse_arguments(app, arguments)) return *code;
  Arguments words = app.remaining();
  for (std::string& word : worker_arguments(bench)) words.push_back(std::move(word));
  std::optional<Options> options = parse_options(words);
  if (!options) return 0;
  if (options->command[0] != kWorker) {
    throw UsageError("deeptide bench comm: got '" + options->command[0] + "', expected options only");
  }
  options->rank_prefix = false;  // only rank 0 prints
  const bool anywhere = has_hostfile(*options) || options->transport || !options->filter.include.empty();
  if (options->num_ranks == 0 && !anywhere && count_devices("/dev", nullptr) == 0) options->num_ranks = 2;
  return run_job(std::move(*options));
}

}  // namespace deeptide::launch
