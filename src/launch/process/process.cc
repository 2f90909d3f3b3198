// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Starts a program by fork and exec, in its own process group.
#include "launch/process/process.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <vector>

#include "base/text.h"

namespace deeptide::launch {
namespace {

struct Pipe {
  int read = -1;
  int write = -1;
};

Pipe make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  return {ends[0], ends[1]};
}

void close_fd(int& fd) {
  if (fd >= 0) close(fd);
  fd = -1;
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> result;
  for (std::string& word : words) result.push_back(word.data());
  result.push_back(nullptr);
  return result;
}

/// MPICH 4.0's Hydra hands the last variable to no other host, so what ranks need comes first.
std::vector<std::string> merged_environment(const Environment& added) {
  std::vector<std::string> merged;
  for (const auto& [name, value] : added) merged.push_back(name + "=" + value);
  for (char** entry = environ; *entry; ++entry) {
    const std::string line = *entry;
    if (!added.count(line.substr(0, line.find('=')))) merged.push_back(line);
  }
  return merged;
}

// Everything that the child needs. Prepared before fork, because no code between fork and exec may allocate.
struct ChildSetup {
  std::vector<char*> arguments;
  std::vector<char*> environment;
  cpu_set_t cores;
  bool bind_cores;
  Terminal terminal;
  Pipe input = {}, output = {}, errors = {}, failure = {};
  pid_t launcher;
  const std::vector<int>& inherited;
  int death_signal;  // sent when the launcher dies
};

[[noreturn]] void run_child(const ChildSetup& setup) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, setup.death_signal);
  if (getppid() != setup.launcher) _exit(127);  // the launcher died before the line above
  // The launcher receives ^C and forwards it, even if a shell started the launcher with interrupts ignored.
  signal(SIGINT, SIG_DFL);
  signal(SIGPIPE, SIG_DFL);
  // A program that writes to the terminal from the background must not be stopped.
  if (setup.terminal.output || setup.terminal.errors) signal(SIGTTOU, SIG_IGN);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (setup.input.read >= 0) {
    dup2(setup.input.read, STDIN_FILENO);
  } else if (!setup.terminal.input) {
    const int null = open("/dev/null", O_RDONLY);
    dup2(null, STDIN_FILENO);
    if (null > STDERR_FILENO) close(null);
  }
  if (setup.output.write >= 0) dup2(setup.output.write, STDOUT_FILENO);
  if (setup.errors.write >= 0) dup2(setup.errors.write, STDERR_FILENO);
  for (const int fd : setup.inherited) fcntl(fd, F_SETFD, 0);
  if (setup.bind_cores) sched_setaffinity(0, sizeof(setup.cores), &setup.cores);
  execve(setup.arguments[0], setup.arguments.data(), setup.environment.data());
  const int error = errno;
  [[maybe_unused]] const ssize_t sent = write(setup.failure.write, &error, sizeof(error));
  _exit(127);
}

// Returns 0 if exec succeeded, because exec closes the pipe.
int exec_error(int fd) {
  int error = 0;
  ssize_t got;
  do {
    got = read(fd, &error, sizeof(error));
  } while (got < 0 && errno == EINTR);
  return got == sizeof(error) ? error : 0;
}

}  // namespace

std::string ExitStatus::text() const {
  if (!signal) return "exited with code " + std::to_string(code);
  const std::string peak = peak_bytes > 0 ? " at " + bytes_text(peak_bytes) : "";
  if (out_of_memory) return "was killed by the kernel's out-of-memory killer" + peak;
  const char* name = sigabbrev_np(signal);
  std::string hint;
  if (signal == SIGKILL) hint = ", often sent by the kernel's out-of-memory killer";
  if (signal == SIGKILL && peak_bytes > 0) hint += "; peak memory " + bytes_text(peak_bytes);
  return "was killed by signal " + std::to_string(signal) + " (" + (name ? std::string("SIG") + name : "unknown") +
         hint + ")";
}

Process::Process(const Command& command, const Terminal& terminal) {
  std::vector<std::string> arguments = command.words;
  std::vector<std::string> environment = merged_environment(command.environment);
  ChildSetup setup{.arguments = pointers(arguments),
                   .environment = pointers(environment),
                   .cores = {},
                   .bind_cores = !command.cores.empty(),
                   .terminal = terminal,
                   .failure = make_pipe(),
                   .launcher = getpid(),
                   .inherited = command.inherited,
                   .death_signal = command.starts_ranks ? SIGTERM : SIGKILL};
  for (int core : command.cores) CPU_SET(core, &setup.cores);
  if (terminal.input_pipe) setup.input = make_pipe();
  if (!terminal.output) setup.output = make_pipe();
  if (!terminal.errors) setup.errors = make_pipe();
  pid_ = fork();
  if (pid_ == 0) run_child(setup);
  const int fork_error = pid_ < 0 ? errno : 0;
  if (pid_ > 0) setpgid(pid_, pid_);  // in both processes, because either may run first
  input_ = setup.input.write;
  output_ = setup.output.read;
  errors_ = setup.errors.read;
  for (int fd : {input_, output_, errors_}) {
    if (fd >= 0) fcntl(fd, F_SETFL, O_NONBLOCK);
  }
  close_fd(setup.input.read);
  close_fd(setup.output.write);
  close_fd(setup.errors.write);
  close_fd(setup.failure.write);
  const int error = fork_error ? fork_error : exec_error(setup.failure.read);
  close_fd(setup.failure.read);
  if (!error) return;
  if (pid_ > 0) waitpid(pid_, nullptr, 0);
  close_fd(input_);
  close_fd(output_);
  close_fd(errors_);
  throw std::system_error(error, std::generic_category(), "cannot start '" + command.words[0] + "'");
}

Process::~Process() {
  send_signal(SIGKILL);
  if (!status_) waitpid(pid_, nullptr, 0);
  close_fd(input_);
  close_fd(output_);
  close_fd(errors_);
}

void Process::close_input() { close_fd(input_); }

void Process::close_output() { close_fd(output_); }

void Process::close_errors() { close_fd(errors_); }

void Process::send_signal(int signal) const { kill(-pid_, signal); }

void Process::pass_on(int signal) const {
  if (!status_) kill(pid_, signal);
}

bool Process::group_alive() const { return kill(-pid_, 0) == 0; }

}  // namespace deeptide::launch
