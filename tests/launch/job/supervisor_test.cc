// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// How jobs end: success, failure, signals, a killed launcher; nothing is left behind.
#include "launch/job/supervisor.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "launch/launched.h"

namespace deeptide::launch {
namespace {

/// Ranks write their process ids (and those of their children) into a folder.
class Ids {
 public:
  std::string folder() const { return folder_.path(""); }

  std::vector<pid_t> read(size_t expected) const {
    std::vector<pid_t> ids;
    const bool complete = eventually([&] {
      ids.clear();
      for (const auto& entry : std::filesystem::directory_iterator(folder())) {
        pid_t pid = 0;
        std::ifstream(entry.path()) >> pid;
        if (pid > 0) ids.push_back(pid);
      }
      return ids.size() == expected;
    });
    EXPECT_TRUE(complete) << ids.size() << " of " << expected << " processes started";
    return ids;
  }

  static void expect_gone(const std::vector<pid_t>& ids) {
    for (pid_t pid : ids) {
      EXPECT_TRUE(eventually([&] { return !process_exists(pid); }, 5)) << "process " << pid << " was left behind";
    }
  }

 private:
  TempFolder folder_;
};

// A rank with a child of its own; `trap` is what the rank does with signals.
std::vector<std::string> sleeping_job(const Ids& ids, const std::string& trap, std::vector<std::string> options = {}) {
  const std::string text = trap + "; sh -c '" + trap + "; sleep infinity; sleep infinity' & echo $! >" + ids.folder() +
                           "/child$RANK; echo $$ >" + ids.folder() + "/rank$RANK; wait; wait; wait; sleep infinity";
  for (const char* word : {"--num_ranks", "2", "sh", "-c"}) options.push_back(word);
  options.push_back(text);
  return options;
}

TEST(Job, SucceedsIfAllRanksDo) {
  const LaunchResult result = launch({"--num_ranks", "3", "true"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.errors.find("rank 0"), std::string::npos) << result.errors;
}

TEST(Job, PassesOnTheExitCode) {
  for (int code : {1, 3, 42, 255}) {
    const LaunchResult result = launch({"--num_ranks", "1", "sh", "-c", "exit " + std::to_string(code)});
    EXPECT_EQ(result.exit_code, code);
    expect_in("rank 0 exited with code " + std::to_string(code) + "\n", result.errors);
  }
}

TEST(Job, EndsTheOthersWhenARankFails) {
  Ids ids;
  const LaunchResult result =
      launch({"--num_ranks", "3", "sh", "-c",
              "cd " + ids.folder() + "; echo $$ >$RANK; " +
                  "if [ $RANK = 1 ]; then while [ ! -s 0 ] || [ ! -s 2 ]; do sleep 0.01; done; exit 3; fi; " +
                  "sleep infinity"});
  EXPECT_EQ(result.exit_code, 3);
  Ids::expect_gone(ids.read(3));
  expect_in("[deeptide] rank 1 exited with code 3; the others were stopped\n", result.errors);
}

TEST(Job, EndsTheChildrenOfTheOthersToo) {
  Ids ids;
  auto job = sleeping_job(ids, "true");
  job.back() = "if [ $RANK = 1 ]; then while [ ! -s " + ids.folder() + "/rank0 ]; do sleep 0.01; done; exit 3; fi; " +
               job.back();
  Launched launched(job);
  const auto pids = ids.read(2);
  EXPECT_EQ(launched.wait().exit_code, 3);
  Ids::expect_gone(pids);
}

TEST(Job, KillsAfterTheGraceWhatIgnoresTheRequest) {
  Ids ids;
  auto job = sleeping_job(ids, "trap \"\" TERM", {"--grace", "0.3"});
  job.back() = "if [ $RANK = 1 ]; then while [ ! -s " + ids.folder() + "/rank0 ]; do sleep 0.01; done; exit 4; fi; " +
               job.back();
  Launched launched(job);
  const auto pids = ids.read(2);
  const LaunchResult result = launched.wait();
  EXPECT_EQ(result.exit_code, 4);
  Ids::expect_gone(pids);
}

TEST(Job, LetsARankCleanUpWithinTheGrace) {
  const LaunchResult result =
      launch({"--num_ranks", "2", "sh", "-c",
              "if [ $RANK = 0 ]; then trap 'echo saved; exit 0' TERM; while :; do sleep 0.02; done; fi;"
              "sleep 0.3; exit 9"});
  EXPECT_EQ(result.exit_code, 9);
  expect_in("[rank 0] saved\n", result.output);
}

TEST(Job, DecodesSignals) {
  const LaunchResult result =
      launch({"--num_ranks", "2", "sh", "-c", "if [ $RANK = 1 ]; then kill -SEGV $$; fi; sleep infinity"});
  EXPECT_EQ(result.exit_code, 128 + SIGSEGV);
  expect_in("rank 1 was killed by signal 11 (SIGSEGV); the others were stopped", result.errors);
  const LaunchResult killed = launch({"--num_ranks", "1", "sh", "-c", "kill -KILL $$"});
  EXPECT_EQ(killed.exit_code, 137);
  expect_in("often sent by the kernel's out-of-memory killer; peak memory ", killed.errors);
}

TEST(Job, EndsWhatARankLeftRunning) {
  Ids ids;
  const LaunchResult result =
      launch({"--num_ranks", "2", "sh", "-c", "sleep infinity & echo $! >" + ids.folder() + "/$RANK; exit 0"});
  EXPECT_EQ(result.exit_code, 0);
  Ids::expect_gone(ids.read(2));
}

TEST(Interrupt, OnceAsksTheRanksAndWaits) {
  TempFolder folder;
  const std::string script = folder.script("train.py", R"(
import sys, time
print('ready', flush=True)
try:
    time.sleep(100)
except KeyboardInterrupt:
    time.sleep(0.2)
    print('saved', flush=True)
)");
  Launched launched({"--num_ranks", "2", script});
  ASSERT_TRUE(eventually([&] {
    return launched.output_so_far().find("[rank 0] ready") != std::string::npos &&
           launched.output_so_far().find("[rank 1] ready") != std::string::npos;
  }));
  launched.send_signal(SIGINT);
  const LaunchResult result = launched.wait();
  EXPECT_EQ(result.exit_code, 130);
  expect_in("[rank 0] saved\n", result.output);
  expect_in("[rank 1] saved\n", result.output);
  EXPECT_EQ(result.errors.find("exited"), std::string::npos) << result.errors;
}

TEST(Interrupt, TwiceKillsAtOnce) {
  Ids ids;
  Launched launched(sleeping_job(ids, "trap \"\" INT TERM", {"--grace", "3600"}));
  const auto pids = ids.read(4);
  launched.send_signal(SIGINT);
  // A second signal that comes before the first is read is one with it.
  ASSERT_TRUE(eventually([&] { return launched.errors_so_far().find("press ^C again") != std::string::npos; }));
  EXPECT_TRUE(process_exists(launched.pid()));
  std::this_thread::sleep_for(kSameSignal);
  launched.send_signal(SIGINT);
  const LaunchResult result = launched.wait();
  EXPECT_EQ(result.exit_code, 130);
  Ids::expect_gone(pids);
}

TEST(Interrupt, CountsOnceWhereItIsSentToTheProcessAndToItsGroup) {
  TempFolder dir;
  const std::string script = dir.script("main.py", R"(
import time
print('ready', flush=True)
try:
    time.sleep(100)
except KeyboardInterrupt:
    time.sleep(0.6)
    print('saved', flush=True)
)");
  Launched launched({"--num_ranks", "1", script});
  ASSERT_TRUE(eventually([&] { return launched.output_so_far().find("ready") != std::string::npos; }));
  launched.send_signal(SIGINT);
  ASSERT_TRUE(eventually([&] { return launched.errors_so_far().find("press ^C again") != std::string::npos; }));
  launched.send_signal(SIGINT);
  const LaunchResult result = launched.wait();
  EXPECT_EQ(result.exit_code, 130);
  expect_in("saved\n", result.output);
}

TEST(Interrupt, DuringAFailuresGraceKeepsTheFailuresCode) {
  Ids ids;
  auto job = sleeping_job(ids, "trap \"\" INT TERM", {"--grace", "60"});
  job.back() = "if [ $RANK = 1 ]; then while [ ! -s " + ids.folder() + "/rank0 ]; do sleep 0.01; done; exit 4; fi; " +
               job.back();
  Launched launched(job);
  const auto pids = ids.read(2);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  launched.send_signal(SIGINT);
  std::this_thread::sleep_for(kSameSignal + std::chrono::milliseconds(50));
  launched.send_signal(SIGINT);
  EXPECT_EQ(launched.wait().exit_code, 4);
  Ids::expect_gone(pids);
}

TEST(Interrupt, IsBoundedByTheGrace) {
  Ids ids;
  Launched launched(sleeping_job(ids, "trap \"\" INT TERM", {"--grace", "0.2"}));
  const auto pids = ids.read(4);
  launched.send_signal(SIGINT);
  EXPECT_EQ(launched.wait().exit_code, 130);
  Ids::expect_gone(pids);
}

TEST(Terminate, StopsTheRanks) {
  Ids ids;
  Launched launched(sleeping_job(ids, "true"));
  const auto pids = ids.read(4);
  launched.send_signal(SIGTERM);
  EXPECT_EQ(launched.wait().exit_code, 143);
  Ids::expect_gone(pids);
}

TEST(Terminate, ReturnsWhatAllRanksSayAsTheyEnd) {
  // 137 is how a rank that is a starter itself, such as srun, tells of SIGKILL.
  const std::pair<const char*, int> cases[] = {{"75", 75}, {"$((75 + RANK))", 143}, {"137", 143}};
  for (const auto& [code, expected] : cases) {
    Launched launched({"--num_ranks", "2", "sh", "-c",
                       "trap 'exit " + std::string(code) + "' TERM; echo ready; while :; do sleep 0.05; done"});
    const auto num_ready = [&] {
      const std::string output = launched.output_so_far();
      return output.find("ready") != output.rfind("ready");
    };
    ASSERT_TRUE(eventually(num_ready));
    launched.send_signal(SIGTERM);
    EXPECT_EQ(launched.wait().exit_code, expected) << code;
  }
}

TEST(Hangup, StopsTheRanksUnlessItIsIgnoredAsNohupHasIt) {
  const std::vector<std::string> job = {"--num_ranks", "1", "sh", "-c", "echo ready; sleep 0.5; echo done"};
  for (const bool ignored : {false, true}) {
    signal(SIGHUP, ignored ? SIG_IGN : SIG_DFL);
    Launched launched(job);
    signal(SIGHUP, SIG_DFL);
    ASSERT_TRUE(eventually([&] { return launched.output_so_far().find("ready") != std::string::npos; }));
    launched.send_signal(SIGHUP);
    const LaunchResult result = launched.wait();
    EXPECT_EQ(result.exit_code, ignored ? 0 : 129) << result.errors;
    EXPECT_EQ(result.output.find("done") != std::string::npos, ignored) << result.output;
  }
}

TEST(Terminate, ReachesAStoppedRank) {
  Ids ids;
  Launched launched(sleeping_job(ids, "true"));
  const auto pids = ids.read(4);
  for (pid_t pid : pids) kill(pid, SIGSTOP);
  launched.send_signal(SIGTERM);
  EXPECT_EQ(launched.wait().exit_code, 143);
  Ids::expect_gone(pids);
}

TEST(KilledLauncher, LeavesNoOrphan) {
  Ids ids;
  Launched launched(sleeping_job(ids, "trap \"\" INT TERM HUP"));
  const auto pids = ids.read(4);
  launched.send_signal(SIGKILL);
  EXPECT_EQ(launched.wait().exit_code, 137);
  Ids::expect_gone(pids);
}

/// Each rank leaves a process in a session of its own, whose parent is gone, without the job's environment.
std::vector<std::string> job_with_daemons(const Ids& ids) {
  const std::string daemon = "trap \"\" TERM HUP INT; echo $$ >" + ids.folder();
  return {"--num_ranks", "2", "sh", "-c",
          "(env -i PATH=$PATH setsid sh -c '" + daemon +
              "/daemon'$RANK'; sleep infinity; sleep infinity' &); echo $$ >" + ids.folder() +
              "/rank$RANK; sleep infinity"};
}

TEST(KilledLauncher, LeavesNoDaemon) {
  Ids ids;
  Launched launched(job_with_daemons(ids));
  const auto pids = ids.read(4);
  launched.send_signal(SIGKILL);
  EXPECT_EQ(launched.wait().exit_code, 137);
  Ids::expect_gone(pids);
}

TEST(KilledLauncher, IsToldAndLeavesNoDaemonIfItIsTheSupervisor) {
  Ids ids;
  Launched launched(job_with_daemons(ids));
  const auto pids = ids.read(4);
  const std::string id = std::to_string(launched.pid());
  ASSERT_EQ(kill(std::atoi(read_file("/proc/" + id + "/task/" + id + "/children").c_str()), SIGKILL), 0);
  const LaunchResult result = launched.wait();
  EXPECT_EQ(result.exit_code, 137);
  expect_in("the supervisor was killed by signal 9", result.errors);
  for (pid_t pid : pids) EXPECT_FALSE(process_exists(pid)) << "the launcher has ended before process " << pid;
}

TEST(Pause, StopsTheLauncherAndItsRanksUntilTheyGoOn) {
  // No loop of short commands: a shell whose child is stopped between vfork and exec waits for it, in state D.
  Launched launched({"--num_ranks", "1", "sh", "-c", "echo $$; exec sleep infinity"});
  ASSERT_TRUE(eventually([&] { return launched.output_so_far().find('\n') != std::string::npos; }));
  const pid_t rank = std::atoi(launched.output_so_far().c_str() + std::string("[rank 0] ").size());
  launched.send_signal(SIGTSTP);
  EXPECT_TRUE(eventually([&] { return is_stopped(rank) && is_stopped(launched.pid()); }));
  launched.send_signal(SIGCONT);
  EXPECT_TRUE(eventually([&] { return !is_stopped(rank) && !is_stopped(launched.pid()); }));
  launched.send_signal(SIGTERM);
  EXPECT_EQ(launched.wait().exit_code, 143);
}

TEST(Reader, ThatIsGoneEndsTheJob) {
  TempFolder folder;
  const std::string script =
      folder.script("head", std::string("#!/bin/sh\n( " DEEPTIDE_COMMAND " --num_ranks 2 yes; echo $? >") +
                                folder.path("code") + ") | head -n 1\n");
  const std::string output = launch({"--num_ranks", "1", script}).output;  // of the rank whose line is first
  EXPECT_TRUE(output == "[rank 0] [rank 0] y\n" || output == "[rank 0] [rank 1] y\n") << output;
  EXPECT_TRUE(eventually([&] { return read_file(folder.path("code")) == "141\n"; })) << read_file(folder.path("code"));
}

/// The output of `arguments` on a terminal. `keys` are pressed when "ready" has been shown.
std::string on_terminal(std::vector<std::string> arguments, int& exit_code, std::string keys = "") {
  arguments.insert(arguments.begin(), DEEPTIDE_COMMAND);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  int terminal = -1;
  const pid_t pid = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (pid == 0) {
    execv(argv[0], argv.data());
    _exit(127);
  }
  std::string shown(64 * 1024, '\0');
  size_t size = 0;
  // The terminal reports an error once its last user is gone.
  while (true) {
    pollfd ready{terminal, POLLIN, 0};
    if (poll(&ready, 1, 30'000) == 0) {
      ADD_FAILURE() << "no word for 30 s after: " << shown.c_str();
      kill(pid, SIGKILL);
      break;
    }
    const ssize_t got = read(terminal, shown.data() + size, shown.size() - size);
    if (got <= 0) break;
    size += got;
    if (keys.empty() || shown.find("ready") == std::string::npos) continue;
    EXPECT_EQ(write(terminal, keys.data(), keys.size()), static_cast<ssize_t>(keys.size()));
    keys.clear();
  }
  shown.resize(size);
  int status = 0;
  waitpid(pid, &status, 0);
  close(terminal);
  exit_code = WEXITSTATUS(status);
  return shown;
}

TEST(Terminal, BelongsToRankZeroAndTheOthersArePrefixed) {
  int exit_code = -1;
  const std::string shown =
      on_terminal({"-q", "--num_ranks", "2", "sh", "-c",
                   "if [ $RANK = 0 ]; then test -t 1 && printf '10%%\\r20%%\\rbar\\n'; else sleep 0.2; echo other; fi"},
                  exit_code);
  EXPECT_EQ(exit_code, 0) << shown;
  expect_in("10%\r20%\rbar\r\n", shown);
  EXPECT_EQ(shown.find("[rank 0]"), std::string::npos) << shown;
  expect_in("\r\033[K[rank 1] other\r\n", shown);
}

// The terminal interrupts every process of the foreground: the job must take that for one request, not two.
TEST(Terminal, InterruptsOnceWithOneKey) {
  int exit_code = -1;
  const std::string shown =
      on_terminal({"--num_ranks", "1", "sh", "-c",
                   "trap 'sleep 0.3; echo saved; exit 0' INT; echo ready; while :; do sleep 0.02; done"},
                  exit_code, "\x03");
  EXPECT_EQ(exit_code, 130) << shown;
  expect_in("saved", shown);
  expect_in("^C again to kill", shown);
}

TEST(Terminal, DoesNotStopARankThatReadsIt) {
  int exit_code = -1;
  const std::string shown =
      on_terminal({"-q", "--num_ranks", "1", "sh", "-c", "read line || echo nothing to read"}, exit_code);
  EXPECT_EQ(exit_code, 0) << shown;
  expect_in("nothing to read", shown);
}

TEST(RankOfStarter, OnlyObeysWhenBothAreAskedToEnd) {
  // srun may ask each process of a step by itself: first the rank, then its supervisor.
  Ids ids;
  const std::vector<std::string> words = {"rank", "sh", "-c", "echo $$ >" + ids.folder() + "/rank; sleep infinity"};
  const std::map<std::string, std::string> environment = {{"SLURM_STEP_ID", "0"},
                                                          {"SLURM_PROCID", "1"},
                                                          {"SLURM_LOCALID", "0"},
                                                          {"SLURM_NTASKS", "2"},
                                                          {"MASTER_ADDR", "127.0.0.1"}};
  for (const bool both : {true, false}) {
    Launched launched(words, environment);
    const pid_t rank = ids.read(1).front();
    kill(rank, SIGTERM);
    sleep_briefly();
    if (both) launched.send_signal(SIGTERM);
    const LaunchResult result = launched.wait();
    EXPECT_EQ(result.exit_code, both ? 1 : 143);
    EXPECT_EQ(result.errors.find("SIGTERM") == std::string::npos, both) << result.errors;
    std::filesystem::remove(ids.folder() + "/rank");
  }
}

}  // namespace
}  // namespace deeptide::launch
