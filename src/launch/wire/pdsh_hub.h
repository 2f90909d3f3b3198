// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Starts agents with pdsh, which forwards no input: they connect back and authenticate with a secret sent over ssh.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "launch/plan/options.h"
#include "launch/process/process.h"
#include "launch/system/poll_set.h"

namespace deeptide::launch {

/// Runs one pdsh and keeps a port open until all agents have connected. Each agent prints a secret to its standard
/// output, which ssh carries to the launcher. It then connects and sends the first half; the launcher answers with the
/// second.
class PdshHub {
 public:
  using OnConnected = std::function<void(size_t host_index, int socket)>;
  using OnLine = std::function<void(const std::string& line)>;
  using OnEnd = std::function<void(int exit_code)>;

  PdshHub(const Options& options, const std::vector<Host>& hosts, OnConnected on_connected, OnLine on_line,
          OnEnd on_end);
  ~PdshHub();
  PdshHub(const PdshHub&) = delete;
  PdshHub& operator=(const PdshHub&) = delete;

  void add_to(PollSet& set);
  /// Waits until `limit` for pdsh to end by itself.
  void close(Clock::time_point limit);

 private:
  struct Guest {
    int socket;
    std::string said;
  };

  void read_output();
  void read_errors();
  void accept_guest();
  void listen_to(Guest& guest);
  void match();

  std::map<size_t, std::string> secrets_;  // by the host's index, from pdsh's output
  size_t num_expected_;
  OnConnected on_connected_;
  OnLine on_line_;
  OnEnd on_end_;
  int listener_ = -1;
  std::unique_ptr<Process> pdsh_;
  std::string output_, errors_;  // unfinished lines
  std::vector<std::unique_ptr<Guest>> guests_;
};

/// The agent's side: prints the secret, connects, authenticates. Returns the socket.
/// Errors: std::runtime_error.
int connect_back(int port, int host_index);

}  // namespace deeptide::launch
