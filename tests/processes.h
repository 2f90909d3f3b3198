// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Ranks as forked processes of a test, which may be killed at any moment.
#pragma once

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

#include "ranks.h"

namespace deeptide {

/// Forks `size` processes that call rank_main(world) over a store in a file. Only from a test that runs no thread.
class RankProcesses {
 public:
  struct Outcome {
    bool ended_in_time = false;
    bool killed = false;  // by SIGKILL
    std::string error;    // text of its exception; empty: none
    std::chrono::steady_clock::time_point when;
  };

  RankProcesses(int size, const RankMain& rank_main) {
    char folder[] = "/tmp/deeptide_ranks.XXXXXX";
    folder_ = ::mkdtemp(folder);
    for (int rank = 0; rank < size; ++rank) {
      int ends[2];
      if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("cannot make a pipe");
      const pid_t pid = ::fork();
      if (pid == 0) run(rank, size, rank_main, ends[1]);
      ::close(ends[1]);
      pids_.push_back(pid);
      pipes_.push_back(ends[0]);
    }
  }
  ~RankProcesses() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (!outcomes_.empty() && outcomes_[rank].ended_in_time) continue;
      ::kill(pids_[rank], SIGKILL);
      ::waitpid(pids_[rank], nullptr, 0);
    }
    for (int pipe : pipes_) ::close(pipe);
    std::filesystem::remove_all(folder_);
  }

  void kill(int rank) { ::kill(pids_[rank], SIGKILL); }

  /// Waits until all have ended or the time is up.
  const std::vector<Outcome>& wait(std::chrono::seconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    outcomes_.resize(pids_.size());
    size_t ended = 0;
    while (ended < pids_.size() && std::chrono::steady_clock::now() < deadline) {
      for (size_t rank = 0; rank < pids_.size(); ++rank) {
        Outcome& outcome = outcomes_[rank];
        int status = 0;
        if (outcome.ended_in_time || ::waitpid(pids_[rank], &status, WNOHANG) <= 0) continue;
        outcome.ended_in_time = true;
        outcome.when = std::chrono::steady_clock::now();
        outcome.killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        char text[4096];
        const auto length = ::read(pipes_[rank], text, sizeof(text));
        outcome.error = std::string(text, static_cast<size_t>(std::max<ssize_t>(length, 0)));
        if (WIFSIGNALED(status) && !outcome.killed) outcome.error = "signal " + std::to_string(WTERMSIG(status));
        ++ended;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return outcomes_;
  }

 private:
  [[noreturn]] void run(int rank, int size, const RankMain& rank_main, int pipe) {
    std::string error;
    try {
      at::set_num_threads(1);
      auto store = c10::make_intrusive<c10d::FileStore>(folder_ + "/store", size);
      rank_main(make_world(store, rank, size));
    } catch (const std::exception& e) {
      error = *e.what() ? e.what() : "an exception without a text";
    }
    error.resize(std::min<size_t>(error.size(), 4096));
    const auto written = ::write(pipe, error.data(), error.size());
    ::_exit(written == static_cast<ssize_t>(error.size()) && error.empty() ? 0 : 1);
  }

  std::string folder_;
  std::vector<pid_t> pids_;
  std::vector<int> pipes_;
  std::vector<Outcome> outcomes_;
};

}  // namespace deeptide
