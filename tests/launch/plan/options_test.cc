// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The command line: what is accepted, and the error for each mistake.
#include "launch/plan/options.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "launch/launched.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

using Words = std::vector<std::string>;

std::string error_of(const Words& arguments) {
  try {
    parse_options(arguments);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Options, LeavesEverythingAfterTheScriptAlone) {
  const Words command = {"train.py", "--num_gpus", "8", "--", "-q", "--unknown=1", "a b", "", "-"};
  Words arguments = {"--num_gpus", "2", "-q"};
  arguments.insert(arguments.end(), command.begin(), command.end());
  const auto options = parse_options(arguments);
  EXPECT_EQ(options->num_ranks, 2);
  EXPECT_TRUE(options->quiet);
  EXPECT_EQ(options->command, command);
}

TEST(Options, TakesTheThreeNamesOfTheNumberOfRanks) {
  for (const char* name : {"--num_gpus", "--num_ranks", "--num_accelerators"}) {
    EXPECT_EQ(parse_options({name, "3", "x"})->num_ranks, 3) << name;
    EXPECT_EQ(parse_options({std::string(name) + "=3", "x"})->num_ranks, 3) << name;
  }
}

TEST(Options, AppendsTheLocalRankOnlyWhenAsked) {
  EXPECT_FALSE(parse_options({"x"})->pass_local_rank);
  EXPECT_FALSE(parse_options({"--no_local_rank", "x"})->pass_local_rank);
  EXPECT_TRUE(parse_options({"--local_rank", "x"})->pass_local_rank);
  expect_in("--no_local_rank", error_of({"--local_rank", "--no_local_rank", "x"}));
}

TEST(Options, RefusesAnUnknownOptionByName) {
  expect_in("unknown option '--num_gpu'; did you mean '--num_gpus'?", error_of({"--num_gpu", "2", "train.py"}));
  expect_in("did you mean '--num_ranks'?", error_of({"--num_rank", "2", "train.py"}));
  expect_in("unknown option '--bogus'", error_of({"--bogus=1", "--num_gpus", "2", "train.py"}));
}

TEST(Options, ChecksTheNumbers) {
  for (const char* count : {"0", "-1", "4097"}) {
    expect_in("--num_ranks must be between 1 and 4096, got " + std::string(count),
              error_of({"--num_ranks", count, "x"}));
  }
  expect_in("two", error_of({"--num_ranks", "two", "x"}));
  expect_in("--master_port must be between 1 and 65535, got 65536", error_of({"--master_port", "65536", "x"}));
  expect_in("--grace", error_of({"--grace", "-1", "x"}));
  expect_in("--grace", error_of({"--grace", "nan", "x"}));
}

TEST(Options, NeedsAScript) {
  expect_in("no script given", error_of({}));
  expect_in("no script given", error_of({"--num_ranks", "2"}));
}

TEST(Options, RefusesAModuleWithoutPython) {
  expect_in("give one of them", error_of({"--module", "--no_python", "x"}));
}

TEST(Command, AnswersHelpAndVersion) {
  const LaunchResult help = launch({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  expect_in("--num_ranks", help.output);
  expect_in("deeptide --num_gpus 2 train.py", help.output);
  const LaunchResult all = launch({"--help-all"});
  EXPECT_EQ(all.exit_code, 0);
  expect_in("for all scripts with --local_rank", all.output);
  for (const RankOption& option : rank_options()) expect_in(option.flag, all.output);
  EXPECT_LT(std::count(help.output.begin(), help.output.end(), '\n'), 55);
  for (const std::string& page : {help.output, all.output}) {
    EXPECT_EQ(page.find("{"), std::string::npos);
    std::istringstream lines(page);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
  }
  const LaunchResult version = launch({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.output.substr(0, 9), "deeptide ");
}

TEST(Command, EndsWithTwoOnAUsageError) {
  const LaunchResult result = launch({"--num_ranks", "0", "true"});
  EXPECT_EQ(result.exit_code, 2);
  expect_in("--num_ranks must be", result.errors);
}

TEST(Options, NoticesItsOwnOptionAfterAScriptThatDoesNotMentionIt) {
  const auto folder = std::filesystem::temp_directory_path() / ("options_test." + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  const std::string script = folder / "q.py";
  std::ofstream(script) << "parser.add_argument('--hostfile')\n";
  EXPECT_EQ(parse_options({script, "--num_ranks", "2"})->misplaced, "--num_ranks");
  EXPECT_EQ(parse_options({script, "--lr=1", "--num_ranks=2"})->misplaced, "--num_ranks");
  EXPECT_EQ(parse_options({script, "--hostfile", "x", "--epochs", "2"})->misplaced, "");
  EXPECT_EQ(parse_options({script, "--", "--num_ranks", "2"})->misplaced, "");
  EXPECT_EQ(parse_options({"--num_ranks", "2", script})->misplaced, "");
  std::filesystem::remove_all(folder);
}

TEST(RankOptions, BecomeTheWordsThatTheyWereParsedFrom) {
  EXPECT_EQ(to_words(*parse_options({"true", "--grace"})), (std::vector<std::string>{"true", "--grace"}));
  for (const RankOption& option : rank_options()) {
    std::vector<std::string> words{option.flag};
    const bool list = std::string(option.flag) == "--bind_core_list";
    if (option.value) words.push_back(list ? "0" : "7.500000");
    if (list) words.insert(words.begin(), "--bind_cores_to_rank");
    words.insert(words.end(), {"run", "-x"});
    EXPECT_EQ(to_words(*parse_options(words)), words) << option.flag;
  }
}

}  // namespace
}  // namespace deeptide::launch
