// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A run of the built launcher, for tests: output goes to files, so that no test has to read pipes meanwhile.
#include "launch/launched.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

namespace deeptide::launch {
namespace {

void redirect(const std::string& path, int flags, int to) {
  const int fd = open(path.c_str(), flags, 0600);
  dup2(fd, to);
  close(fd);
}

// 'R', 'S', 'T' …; 0: gone.
char state_of(pid_t pid) {
  const std::string stat = read_file("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = stat.rfind(')');
  return name_end == std::string::npos ? '\0' : stat.at(name_end + 2);
}

}  // namespace

void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in:\n" << text;
}

TempFolder::TempFolder() {
  std::string pattern = std::filesystem::temp_directory_path() / "deeptide-launch-XXXXXX";
  folder_ = mkdtemp(pattern.data());
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::string TempFolder::script(const std::string& name, const std::string& text) const {
  std::ofstream(path(name)) << text;
  std::filesystem::permissions(path(name), std::filesystem::perms::owner_all);
  return path(name);
}

Launched::Launched(std::vector<std::string> arguments, std::map<std::string, std::string> environment) {
  arguments.insert(arguments.begin(), DEEPTIDE_COMMAND);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ != 0) return;
  signal(SIGINT, SIG_DFL);
  redirect("/dev/null", O_RDONLY, STDIN_FILENO);
  redirect(folder_.path("out"), O_WRONLY | O_CREAT, STDOUT_FILENO);
  redirect(folder_.path("err"), O_WRONLY | O_CREAT, STDERR_FILENO);
  for (const char* name : {"OMP_NUM_THREADS", "PYTHONUNBUFFERED", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES"})
    unsetenv(name);
  for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
  execv(argv[0], argv.data());
  _exit(127);
}

Launched::~Launched() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void Launched::send_signal(int signal) const { kill(pid_, signal); }

LaunchResult Launched::wait() {
  LaunchResult result;
  int status = 0;
  const bool ended = eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; }, 30);
  EXPECT_TRUE(ended) << "the launcher did not end; its output so far:\n" << output_so_far();
  if (!ended) {
    kill(pid_, SIGKILL);
    waitpid(pid_, &status, 0);
  }
  pid_ = -1;
  result.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  result.output = read_file(folder_.path("out"));
  result.errors = read_file(folder_.path("err"));
  return result;
}

std::string Launched::errors_so_far() const { return read_file(folder_.path("err")); }

std::string Launched::output_so_far() const { return read_file(folder_.path("out")); }

LaunchResult launch(std::vector<std::string> arguments, std::map<std::string, std::string> environment) {
  return Launched(std::move(arguments), std::move(environment)).wait();
}

std::string read_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

bool process_exists(pid_t pid) {
  // A zombie that its reaper has not collected yet is gone as far as the job is concerned.
  const char state = state_of(pid);
  return state != '\0' && state != 'Z';
}

bool is_stopped(pid_t pid) { return state_of(pid) == 'T'; }

void sleep_briefly() { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }

}  // namespace deeptide::launch
