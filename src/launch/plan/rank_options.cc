// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Holds the table of the options that are sent to every host.
#include "launch/plan/rank_options.h"

namespace deeptide::launch {
namespace {

using Group = RankOption::Group;

constexpr RankOption kOptions[] = {
    {"--module", nullptr, &RankOptions::module, Group::ranks, "Run the script as a Python module (python3 -m)"},
    {"--no_python", nullptr, &RankOptions::no_python, Group::ranks, "Run the script itself, even if it is named *.py"},
    {"--as-deepspeed", nullptr, &RankOptions::as_deepspeed, Group::ranks,
     "Python scripts that import deepspeed get Deeptide's interface of that name"},
    {"--python", "PATH", &RankOptions::python, Group::ranks, "The Python interpreter to use"},
    {"--local_rank", nullptr, &RankOptions::pass_local_rank, Group::ranks,
     "Append --local_rank=N to the script's arguments"},
    {"--no_local_rank", nullptr, &RankOptions::no_local_rank, Group::ranks, "Never append --local_rank=N"},
    {"--bind_cores_to_rank", nullptr, &RankOptions::bind_cores, Group::ranks,
     "Bind each rank to its own share of the cores"},
    {"--bind_core_list", "LIST", &RankOptions::bind_core_list, Group::ranks, "Share out only these cores, e.g. 0,2-5"},
    {"--enable_each_rank_log", "DIR", &RankOptions::log_dir, Group::ending,
     "Write the output to one file per rank in DIR"},
    {"--no_rank_prefix", nullptr, &RankOptions::rank_prefix, Group::ending,
     "Print the ranks' lines without the prefix '[rank N] '"},
    {"--grace", "SECONDS", &RankOptions::grace_s, Group::ending,
     "Seconds between asking a rank to stop and killing it (default: 30; after a failure 5)"},
    {"--hang_timeout", "SECONDS", &RankOptions::hang_timeout_s, Group::ending,
     "Seconds that a rank may wait for a collective before a hang report (0: no reports)"},
    {"--heartbeat_timeout", "SECONDS", &RankOptions::heartbeat_timeout_s, Group::ending,
     "Seconds without a heartbeat after which a host counts as lost"},
};

std::string text_of(bool) { return ""; }
std::string text_of(const std::string& value) { return value; }
std::string text_of(double value) { return std::to_string(value); }
std::string text_of(const std::optional<double>& value) { return std::to_string(*value); }

}  // namespace

std::span<const RankOption> rank_options() { return kOptions; }

std::vector<std::string> to_words(const RankOptions& options, const std::vector<std::string>& extra) {
  const RankOptions defaults;
  std::vector<std::string> words;
  for (const RankOption& option : kOptions) {
    std::visit(
        [&](auto member) {
          if (options.*member == defaults.*member) return;
          words.push_back(option.flag);
          if (option.value) words.push_back(text_of(options.*member));
        },
        option.member);
  }
  words.insert(words.end(), extra.begin(), extra.end());
  words.insert(words.end(), options.command.begin(), options.command.end());
  return words;
}

}  // namespace deeptide::launch
