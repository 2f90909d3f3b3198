// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Signals the processes that catch the signal and waits for their answers.
#include "launch/watch/rank_stacks.h"

#include <cxxabi.h>
#include <dirent.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <thread>
#include <vector>

#include "base/text.h"

namespace deeptide::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kPatience{1000};
constexpr size_t kMaxThreads = 64;
constexpr size_t kMaxFrames = 24;
constexpr size_t kMaxNameLength = 120;

std::string proc(pid_t pid, const std::string& file) { return "/proc/" + std::to_string(pid) + "/" + file; }

/// Reads a signal mask of /proc/…/status, in which bit n - 1 stands for signal n.
bool has_signal(const std::string& status_path, const std::string& field, int signal) {
  std::ifstream file(status_path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, field.size(), field) != 0) continue;
    const uint64_t mask = std::strtoull(line.c_str() + field.size(), nullptr, 16);
    return (mask >> (signal - 1) & 1) != 0;
  }
  return false;
}

// The signal would kill a process that does not catch it.
bool catches(pid_t pid, int signal) { return has_signal(proc(pid, "status"), "SigCgt:", signal); }

std::vector<pid_t> threads_of(pid_t pid) {
  std::vector<pid_t> threads;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(proc(pid, "task").c_str()), &::closedir);
  while (const dirent* entry = folder ? ::readdir(folder.get()) : nullptr) {
    if (const int id = std::atoi(entry->d_name); id > 0) threads.push_back(id);
  }
  std::sort(threads.begin(), threads.end());
  if (threads.size() > kMaxThreads) threads.resize(kMaxThreads);
  return threads;
}

bool is_stopped(pid_t pid) {
  const std::string line = first_line_of(proc(pid, "stat"));
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return true;
  return std::string("TtZX").find(line[name_end + 2]) != std::string::npos;
}

/// Returns the text that is written to the file until `complete` is true or the time limit passes.
std::string answer(const FlightFiles& files, const std::function<bool(const std::string&)>& complete) {
  const auto limit = steady_clock::now() + kPatience;
  while (true) {
    std::string text = files.stacks();
    if (complete(text) || steady_clock::now() > limit) return text;
    std::this_thread::sleep_for(milliseconds(10));
  }
}

std::string python_stacks(pid_t pid, const FlightFiles& files) {
  if (!catches(pid, trace::python_stacks_signal())) return "";
  files.clear_stacks();
  if (::kill(pid, trace::python_stacks_signal()) != 0) return "";
  // faulthandler writes no end mark, so its output is complete when it stops growing.
  std::string last;
  return answer(files, [&last](const std::string& text) {
    const bool same = !text.empty() && text == last;
    last = text;
    return same;
  });
}

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

/// Signals one thread after the other, so that their lines do not mix.
std::string native_answers(pid_t pid, const FlightFiles& files) {
  const int signal = trace::native_stack_signal();
  if (!catches(pid, signal)) return "";
  files.clear_stacks();
  size_t asked = 0;
  std::string text;
  for (const pid_t thread : threads_of(pid)) {
    const std::string status = proc(pid, "task/" + std::to_string(thread) + "/status");
    if (has_signal(status, "SigBlk:", signal) || ::syscall(SYS_tgkill, pid, thread, signal) != 0) continue;
    ++asked;
    text = answer(files, [asked](const std::string& so_far) { return count_of(so_far, "\nend\n") >= asked; });
    if (count_of(text, "\nend\n") < asked)
      break;  // it does not answer; waiting for each of the others would take as long
  }
  return text;
}

// True for frames without information: those of the handler itself, of the interpreter (Python's own stack shows more),
// and unnamed ones of the C library.
bool is_noise(const std::string& frame) {
  if (frame.starts_with("+0x") && (frame.ends_with(" in libc.so.6") || frame.ends_with(" in libstdc++.so.6")))
    return true;
  for (const char* part : {"write_stack", "__restore_rt", "libpython", "_PyEval", "_PyFunction", "PyObject_", "PyEval_",
                           "pthread_kill", "python3", "__libc_start_main", "_start in "}) {
    if (frame.find(part) != std::string::npos) return true;
  }
  return frame.empty();
}

/// Gives threads in the same place one entry, so that a pool of thirty sleeping threads takes one line.
std::string native_stacks(pid_t pid, const FlightFiles& files) {
  std::map<std::string, std::vector<std::string>> by_stack;
  std::vector<std::string> order;
  std::istringstream lines(native_answers(pid, files));
  std::string thread, stack;
  size_t frames = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.compare(0, 7, "thread ") == 0) {
      thread = line, stack.clear(), frames = 0;
    } else if (line == "end") {
      if (by_stack[stack].empty()) order.push_back(stack);
      by_stack[stack].push_back(thread);
    } else if (const std::string frame = readable_frame(line); !is_noise(frame) && frames++ < kMaxFrames) {
      stack += "  " + frame + "\n";
    }
  }
  std::string text;
  for (const std::string& one : order) {
    const auto& threads = by_stack[one];
    const std::string more = threads.size() > 1 ? " and " + std::to_string(threads.size() - 1) + " more" : "";
    text += threads.front() + more + ", native:\n" + (one.empty() ? "  (only the interpreter)\n" : one);
  }
  return text;
}

std::string kernel_facts(pid_t pid) {
  std::string text = "the process cannot answer (stopped, ended, or without Deeptide); the kernel reports:\n";
  for (const pid_t thread : threads_of(pid)) {
    const std::string task = "task/" + std::to_string(thread) + "/";
    std::string stack;
    std::ifstream file(proc(pid, task + "stack"));
    for (std::string line; std::getline(file, line) && stack.size() < 400;) {
      stack += "  " + line.substr(line.find(' ') == std::string::npos ? 0 : line.find(' ') + 1) + "\n";
    }
    text += "thread " + std::to_string(thread) + " " + first_line_of(proc(pid, task + "comm")) + ": waiting in " +
            first_line_of(proc(pid, task + "wchan")) + ", system call " + first_line_of(proc(pid, task + "syscall")) +
            "\n" + stack;
  }
  return text;
}

}  // namespace

std::string readable_frame(const std::string& line) {
  const size_t open = line.find('('), plus = line.find('+', open == std::string::npos ? 0 : open);
  const size_t close = line.find(')', open == std::string::npos ? 0 : open);
  if (open == std::string::npos || plus == std::string::npos || close == std::string::npos) return line;
  const size_t slash = line.rfind('/', open);
  const std::string library =
      line.substr(slash == std::string::npos ? 0 : slash + 1, open - (slash == std::string::npos ? 0 : slash + 1));
  std::string name = line.substr(open + 1, plus - open - 1);
  if (name.empty()) return line.substr(plus, close - plus) + " in " + library;
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> plain(abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status),
                                                     &std::free);
  if (status == 0) name = plain.get();
  if (name.size() > kMaxNameLength) name = name.substr(0, kMaxNameLength) + "…";
  return name + " in " + library;
}

std::string collect_stacks(pid_t pid, const FlightFiles& files) {
  if (is_stopped(pid)) return kernel_facts(pid);
  const std::string text = python_stacks(pid, files) + native_stacks(pid, files);
  return text.empty() ? kernel_facts(pid) : text;
}

}  // namespace deeptide::launch
