// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The hostfile, its filters, a shell's words, exported variables: examples; tests/hosts has the model and the grid.
#include "launch/plan/hostfile.h"

#include <gtest/gtest.h>

#include "launch/plan/elastic_hosts.h"
#include "launch/plan/exports.h"
#include "launch/system/shell.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

template <typename Function>
std::string error_of(const Function& function) {
  try {
    function();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Hostfile, KeepsTheOrderAndSkipsComments) {
  const std::vector<Host> expected = {{"w2", {0, 1}}, {"w1", {0}}};
  EXPECT_EQ(parse_hostfile("# all\n\n w2\tslots=2 # two\r\nw1 slots=1 max_slots=4", "f"), expected);
}

TEST(Hostfile, NamesTheLineOfAMistake) {
  const std::map<std::string, std::string> cases = {
      {"a slots=1\nb\n", "f:2: bad entry 'b': expected 'NAME slots=N'"},
      {"\na slots=x", "f:2: bad entry 'a slots=x': expected 'NAME slots=N', N from 1 to 4096"},
      {"a slots=0",
       "f:1: bad entry 'a slots=0': a host needs at least one slot; comment the line out with '#' to skip the host"},
      {"a slots=1\n#\na slots=2",
       "f:3: duplicate entry for host 'a', which is already on line 1; list its slots in one entry"},
      {"-oProxyCommand=x slots=1",
       "f:1: bad entry '-oProxyCommand=x slots=1': '-oProxyCommand=x' is not a valid host name"},
      {"# none\n", "f: the hostfile lists no hosts; expected 'NAME slots=N'"},
  };
  for (const auto& [text, expected] : cases) {
    EXPECT_EQ(error_of([&] { parse_hostfile(text, "f"); }), expected);
  }
}

TEST(FilterHosts, TakesSlotsOfSeveralHosts) {
  const std::vector<Host> hosts = parse_hostfile("worker-1 slots=4\nworker-2 slots=4\nworker-3 slots=4\n", "f");
  HostFilter include;
  include.include = "worker-3:0,1@worker-2:0";
  const std::vector<Host> included = {{"worker-2", {0}}, {"worker-3", {0, 1}}};
  EXPECT_EQ(filter_hosts(hosts, include), included);
  HostFilter exclude;
  exclude.exclude = "worker-2@worker-3:1-3";
  const std::vector<Host> left = {{"worker-1", {0, 1, 2, 3}}, {"worker-3", {0}}};
  EXPECT_EQ(filter_hosts(hosts, exclude), left);
}

TEST(ElasticHosts, GiveUpTheLastSlots) {
  const std::vector<Host> hosts = {{"a", {0, 1}}, {"b", {0, 1}}, {"c", {2}}};
  EXPECT_EQ(first_slots(hosts, 3), (std::vector<Host>{{"a", {0, 1}}, {"b", {0}}}));
  EXPECT_EQ(first_slots(hosts, 9), hosts);
  EXPECT_TRUE(first_slots(hosts, 0).empty());
}

TEST(ElasticHosts, ReadTheScriptsConfiguration) {
  EXPECT_EQ(config_argument({"x.py", "--deepspeed", "--deepspeed_config", "a.json"}), "a.json");
  EXPECT_EQ(config_argument({"x.py", "--deepspeed=b.json"}), "b.json");
  EXPECT_EQ(config_argument({"x.py", "--config"}), "");
}

TEST(ShellSplit, UndoesQuoting) {
  const std::vector<std::string> words = {"a b", "", "it's", "\"x\"", "\\", "$HOME", "\n"};
  EXPECT_EQ(shell_split(shell_join(words), "x"), words);
  const std::vector<std::string> expected = {"-o", "A=b c", "d\"e", "f g"};
  EXPECT_EQ(shell_split(" -o 'A=b c'  \"d\\\"e\" f\\ g ", "x"), expected);
  EXPECT_EQ(error_of([] { shell_split("a 'b", "--launcher_args"); }), "--launcher_args: unclosed quote (') in: a 'b");
}

TEST(Exports, AreThePrefixesAndTheFilesOnly) {
  const char* const environment[] = {"NCCL_DEBUG=INFO",      "PATH=/bin", "NCCLX", "PYTHONPATH=a=b", "XNCCL=1",
                                     "DEEPTIDE_JOB_TOKEN=x", nullptr};
  const Environment expected = {{"NCCL_DEBUG", "INFO"}, {"NCCLX", ""}, {"PYTHONPATH", "a=b"}};
  EXPECT_EQ(exported_environment(environment, {}), expected);
  const Environment file = {{"A", "1 2"}, {"B", "q"}, {"C", ""}, {"D", "'open"}};
  EXPECT_EQ(parse_env_file("A=1 2\n# no\n\n export B='q'\r\nC=\nD='open\n", "f"), file);
}

TEST(Exports, TheirNamesTellSecretsInAnySpelling) {
  for (const char* name : {"hf_token", "DB_PASSWD", "PGPASS", "WANDB_API_KEY", "My_Auth", "DB_PWD", "GitHub_Secret"}) {
    EXPECT_TRUE(is_secret(name)) << name;
  }
  for (const char* name : {"NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONPATH"}) EXPECT_FALSE(is_secret(name)) << name;
}

}  // namespace
}  // namespace deeptide::launch
