// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A run of the built launcher, for tests: started, signalled, waited for, its output read.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace deeptide::launch {

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Expects that `text` contains `part`, and shows the text otherwise.
void expect_in(const std::string& part, const std::string& text);

struct LaunchResult {
  int exit_code = -1;  // 128 + signal if the launcher itself was killed
  std::string output;
  std::string errors;
};

/// A folder that goes away with its owner.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  /// Writes an executable script and returns its path.
  std::string script(const std::string& name, const std::string& text) const;

 private:
  std::string folder_;
};

/// A started launcher; killed if it is still there at the end.
class Launched {
 public:
  explicit Launched(std::vector<std::string> arguments, std::map<std::string, std::string> environment = {});
  ~Launched();
  Launched(const Launched&) = delete;
  Launched& operator=(const Launched&) = delete;

  pid_t pid() const { return pid_; }
  void send_signal(int signal) const;
  /// Waits, 30 s at most: then it fails the test and kills the launcher.
  LaunchResult wait();
  std::string output_so_far() const;
  std::string errors_so_far() const;

 private:
  TempFolder folder_;
  pid_t pid_ = -1;
};

LaunchResult launch(std::vector<std::string> arguments, std::map<std::string, std::string> environment = {});

std::string read_file(const std::string& path);
bool process_exists(pid_t pid);
/// By SIGSTOP or a terminal.
bool is_stopped(pid_t pid);
/// Polls until `condition` holds; false after `seconds`.
template <typename Condition>
bool eventually(const Condition& condition, double seconds = 10.0);
void sleep_briefly();

template <typename Condition>
bool eventually(const Condition& condition, double seconds) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > limit) return false;
    sleep_briefly();
  }
  return true;
}

}  // namespace deeptide::launch
