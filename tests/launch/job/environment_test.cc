// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Looks at what a rank finds: its variables, its arguments, its interpreter, its cores.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "launch/launched.h"
#include "launch/machine/held_port.h"
#include "launch/machine/machine.h"

namespace deeptide::launch {
namespace {

TEST(Environment, TellsEachRankItsPlace) {
  const LaunchResult result =
      launch({"--log_level=warning", "--num_ranks", "2", "--master_port", std::to_string(HeldPort::choose(0).number()),
              "sh", "-c",
              "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $LOCAL_SIZE $CROSS_RANK $CROSS_SIZE $MASTER_ADDR"
              " $DEEPTIDE_LAUNCHER $PYTHONUNBUFFERED"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  expect_in("[rank 0] 0 0 2 2 2 0 1 127.0.0.1 1 1\n", result.output);
  expect_in("[rank 1] 1 1 2 2 2 0 1 127.0.0.1 1 1\n", result.output);
  EXPECT_EQ(result.errors, "");
}

/// MPICH's Hydra loses the last variable on the way to another host.
TEST(Environment, BeginsWithWhatTheLauncherAdds) {
  const std::string output = launch({"--num_ranks", "1", "env"}, {{"NOT_EXPORTED", "1"}}).output;
  EXPECT_LT(output.find("] WORLD_SIZE="), output.find("] NOT_EXPORTED=")) << output;
  EXPECT_LT(output.find("] MASTER_ADDR="), output.find("] PATH=")) << output;
  EXPECT_LT(output.find("] PATH="), output.size());
}

TEST(Environment, LeavesARankThirtyTwoQueuesOfAGpuUnlessTheUserDecided) {
  const std::vector<std::string> command = {"--num_ranks", "1", "sh", "-c", "echo queues=$CUDA_DEVICE_MAX_CONNECTIONS"};
  expect_in("queues=32\n", launch(command).output);
  expect_in("queues=1\n", launch(command, {{"CUDA_DEVICE_MAX_CONNECTIONS", "1"}}).output);
}

TEST(Environment, KeepsDevicesHiddenThatTheUserHides) {
  const TempFolder folder;
  const std::string hosts = folder.path("hosts");
  std::ofstream(hosts) << "localhost slots=2\n";
  const std::vector<std::string> command = {"--hostfile", hosts, "sh", "-c", "echo visible=$CUDA_VISIBLE_DEVICES."};
  expect_in("visible=0,1.\n", launch(command).output);
  expect_in("visible=.\n", launch(command, {{"CUDA_VISIBLE_DEVICES", ""}}).output);
}

TEST(Environment, GivesAllRanksTheSamePort) {
  const std::string port = std::to_string(HeldPort::choose(0).number());
  const LaunchResult given = launch({"--num_ranks", "2", "--master_port", port, "sh", "-c", "echo $MASTER_PORT"});
  expect_in("[rank 0] " + port + "\n", given.output);
  expect_in("[rank 1] " + port + "\n", given.output);
  const LaunchResult chosen = launch({"--num_ranks", "2", "sh", "-c", "echo port=$MASTER_PORT"});
  const size_t first = chosen.output.find("port="), second = chosen.output.rfind("port=");
  EXPECT_NE(first, second);
  EXPECT_EQ(std::stoi(chosen.output.substr(first + 5)), std::stoi(chosen.output.substr(second + 5)));
}

TEST(Environment, SharesTheCoresAmongThreadsUnlessTheUserDecided) {
  const size_t each = std::max<size_t>(1, usable_cores().size() / 2);
  const std::vector<std::string> command = {"--num_ranks", "2", "sh", "-c", "echo threads=$OMP_NUM_THREADS"};
  expect_in("threads=" + std::to_string(each) + "\n", launch(command).output);
  expect_in("threads=7\n", launch(command, {{"OMP_NUM_THREADS", "7"}}).output);
}

TEST(Environment, BindsEachRankToItsCores) {
  const LaunchResult result =
      launch({"--num_ranks", "1", "--bind_cores_to_rank", "sh", "-c", "grep Cpus_allowed: /proc/self/status"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  const std::string too_many = std::to_string(usable_cores().size() + 1);
  const LaunchResult refused = launch({"--num_ranks", too_many, "--bind_cores_to_rank", "true"});
  EXPECT_EQ(refused.exit_code, 2);
  expect_in(too_many + " ranks", refused.errors);
}

TEST(Environment, BindsTwoRanksToDifferentCores) {
  if (usable_cores().size() < 2) GTEST_SKIP() << "one core only";
  const LaunchResult result = launch(
      {"--num_ranks", "2", "--bind_cores_to_rank", "sh", "-c", "grep Cpus_allowed: /proc/self/status | cut -f2"});
  const size_t first = result.output.find("] ") + 2, second = result.output.rfind("] ") + 2;
  EXPECT_NE(result.output.substr(first, result.output.find('\n', first) - first),
            result.output.substr(second, result.output.find('\n', second) - second));
}

TEST(Arguments, PassUnchanged) {
  TempFolder folder;
  const std::string script = folder.script("show", "#!/bin/sh\nfor a in \"$@\"; do printf '<%s>\\n' \"$a\"; done\n");
  const LaunchResult result = launch(
      {"--num_ranks", "1", script, "a b", "it's", "\"quoted\"", "", "$HOME", "--num_ranks", "--", "back\\slash", "*"});
  EXPECT_EQ(result.output,
            "[rank 0] <a b>\n[rank 0] <it's>\n[rank 0] <\"quoted\">\n[rank 0] <>\n[rank 0] <$HOME>\n"
            "[rank 0] <--num_ranks>\n[rank 0] <-->\n[rank 0] <back\\slash>\n[rank 0] <*>\n");
}

TEST(Arguments, EndWithTheLocalRankIfAsked) {
  const LaunchResult result = launch({"--num_ranks", "2", "--local_rank", "echo", "x"});
  expect_in("[rank 0] x --local_rank=0\n", result.output);
  expect_in("[rank 1] x --local_rank=1\n", result.output);
}

TEST(Python, RunsScriptsAndModules) {
  TempFolder folder;
  const std::string script = folder.script("train.py", "import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\n");
  expect_in("[rank 1] 1 ['--x', 'a b']\n", launch({"--num_ranks", "2", script, "--x", "a b"}).output);
  const LaunchResult module = launch({"--num_ranks", "1", "--module", "platform", "--terse"});
  EXPECT_EQ(module.exit_code, 0) << module.errors;
  expect_in("[rank 0] Linux", module.output);
}

TEST(Python, IsTheVirtualEnvironmentsOrTheOneGiven) {
  TempFolder folder;
  std::filesystem::create_directory(folder.path("bin"));
  folder.script("bin/python3", "#!/bin/sh\necho fake \"$@\"\n");
  const std::string script = folder.script("train.py", "");
  EXPECT_EQ(launch({"--num_ranks", "1", script}, {{"VIRTUAL_ENV", folder.path("")}}).output,
            "[rank 0] fake " + script + "\n");
  EXPECT_EQ(launch({"--num_ranks", "1", "--python", folder.path("bin/python3"), script}).output,
            "[rank 0] fake " + script + "\n");
}

TEST(Python, IsNotUsedIfTheUserSaysSo) {
  TempFolder folder;
  const std::string script = folder.script("train.py", "#!/bin/sh\necho from the shell\n");
  EXPECT_EQ(launch({"--num_ranks", "1", "--no_python", script}).output, "[rank 0] from the shell\n");
}

TEST(Program, MustExistAndBeExecutable) {
  TempFolder folder;
  const std::string plain = folder.script("plain", "");
  std::filesystem::permissions(plain, std::filesystem::perms::owner_read);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {plain, "neither a .py script nor executable"},
      {folder.path("none.py"), "does not exist"},
      {folder.path("none"), "does not exist"},
      {folder.path(""), "is a folder"},
      {"no-such-program-anywhere", "was not found in PATH"},
  };
  for (const auto& [program, text] : cases) {
    const LaunchResult result = launch({"--num_ranks", "1", program});
    EXPECT_EQ(result.exit_code, 2) << program;
    expect_in(text, result.errors);
  }
}

TEST(Program, ThatTheKernelRefusesIsNamed) {
  TempFolder folder;
  const std::string garbage = folder.script("garbage",
                                            "\x7f"
                                            "ELF is not what this is");
  const LaunchResult result = launch({"--num_ranks", "1", garbage});
  EXPECT_EQ(result.exit_code, 126);
  expect_in("cannot start '" + garbage + "'", result.errors);
}

TEST(DryRun, PrintsLinesThatAShellRuns) {
  TempFolder folder;
  const LaunchResult printed =
      launch({"--num_ranks", "2", "--dry-run", "sh", "-c", "printf '%s\\n' \"$RANK\" \"$1\"", "x", "it's  here"});
  EXPECT_EQ(printed.exit_code, 0);
  EXPECT_EQ(std::count(printed.output.begin(), printed.output.end(), '\n'), 2);
  const std::string script = folder.script("run", "#!/bin/sh\n" + printed.output);
  EXPECT_EQ(launch({"--num_ranks", "1", script}).output,
            "[rank 0] 0\n[rank 0] it's  here\n[rank 0] 1\n[rank 0] it's  here\n");
}

}  // namespace
}  // namespace deeptide::launch
