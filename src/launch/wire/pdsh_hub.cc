// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Receives each agent's secret over ssh and then talks to it over a socket.
#include "launch/wire/pdsh_hub.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "base/sha256.h"
#include "launch/machine/listener.h"
#include "launch/plan/host_commands.h"
#include "launch/process/keeper.h"

namespace deeptide::launch {
namespace {

constexpr const char* kMark = "DEEPTIDE-SECRET ";
constexpr size_t kHalf = 32;  // hexadecimal digits
constexpr size_t kLongestGreeting = 128;
constexpr int kConnectTimeout_s = 10;

// Calls `line` for each complete line and removes it from `bytes`.
template <typename Function>
void for_lines(std::string& bytes, const Function& line) {
  for (size_t end; (end = bytes.find('\n')) != std::string::npos; bytes.erase(0, end + 1)) line(bytes.substr(0, end));
}

std::string read_exactly(int socket, size_t size) {
  std::string bytes(size, '\0');
  for (size_t done = 0; done < size;) {
    const ssize_t got = recv(socket, bytes.data() + done, size - done, 0);
    if (got <= 0) throw std::runtime_error("the launcher did not answer");
    done += got;
  }
  return bytes;
}

int connect_to(const std::string& host, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    throw std::runtime_error("'" + host + "' is not an address of the launcher");
  }
  const int descriptor = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval limit{kConnectTimeout_s, 0};
  setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));  // also limits connect()
  setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  const int failed = connect(descriptor, found->ai_addr, found->ai_addrlen);
  const int error = errno;
  freeaddrinfo(found);
  if (!failed) return descriptor;
  ::close(descriptor);
  throw std::runtime_error("cannot connect to the launcher at " + host + ":" + std::to_string(port) + ": " +
                           std::strerror(error) + "; does a firewall block the port?");
}

}  // namespace

PdshHub::PdshHub(const Options& options, const std::vector<Host>& hosts, OnConnected on_connected, OnLine on_line,
                 OnEnd on_end)
    : num_expected_(hosts.size()),
      on_connected_(std::move(on_connected)),
      on_line_(std::move(on_line)),
      on_end_(std::move(on_end)) {
  int port = 0;
  listener_ = open_listener(port);
  Command command{.words = pdsh_command(options, hosts, port), .environment = starter_environment(options)};
  command.words[0] = require_program("pdsh", "pdsh");
  pdsh_ = std::make_unique<Process>(command, Terminal{});
}

PdshHub::~PdshHub() {
  if (listener_ >= 0) ::close(listener_);
  for (const auto& guest : guests_) {
    if (guest->socket >= 0) ::close(guest->socket);
  }
  pdsh_.reset();
  kill_children([](int) { return false; });  // an ssh to an unresponsive host would outlive pdsh
}

void PdshHub::add_to(PollSet& set) {
  if (listener_ >= 0) set.add(listener_, POLLIN, [this] { accept_guest(); });
  if (pdsh_->output_fd() >= 0) set.add(pdsh_->output_fd(), POLLIN, [this] { read_output(); });
  if (pdsh_->errors_fd() >= 0) set.add(pdsh_->errors_fd(), POLLIN, [this] { read_errors(); });
  for (const auto& guest : guests_) {
    if (guest->socket >= 0) set.add(guest->socket, POLLIN, [this, g = guest.get()] { listen_to(*g); });
  }
}

void PdshHub::read_output() {
  char buffer[4096];
  const ssize_t got = read(pdsh_->output_fd(), buffer, sizeof(buffer));
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) {
    pdsh_->close_output();
    int status = 0;
    if (waitpid(pdsh_->pid(), &status, 0) == pdsh_->pid()) pdsh_->record_exit({WEXITSTATUS(status), WTERMSIG(status)});
    return on_end_(pdsh_->status() ? pdsh_->status()->exit_code() : -1);
  }
  output_.append(buffer, got);
  for_lines(output_, [this](const std::string& line) {
    const size_t at = line.find(kMark);
    if (at == std::string::npos) return on_line_(line);
    std::istringstream words(line.substr(at + std::strlen(kMark)));
    size_t index = 0;
    std::string secret;
    if (words >> index >> secret && index < num_expected_ && secret.size() == 2 * kHalf) {
      secrets_.emplace(index, secret);  // keeps the first one
    }
  });
  match();
}

void PdshHub::read_errors() {
  char buffer[4096];
  const ssize_t got = read(pdsh_->errors_fd(), buffer, sizeof(buffer));
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) return pdsh_->close_errors();
  errors_.append(buffer, got);
  for_lines(errors_, on_line_);
}

void PdshHub::accept_guest() {
  const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (socket >= 0) guests_.push_back(std::make_unique<Guest>(Guest{socket, {}}));
}

void PdshHub::listen_to(Guest& guest) {
  char buffer[kLongestGreeting];
  // Read no byte beyond the greeting, because the rest belongs to the agent's frames.
  const ssize_t got = recv(guest.socket, buffer, kHalf - std::min(kHalf, guest.said.size()), 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) {
    ::close(guest.socket);
    guest.socket = -1;
    return;
  }
  guest.said.append(buffer, got);
  match();
}

void PdshHub::match() {
  for (const auto& guest : guests_) {
    if (guest->socket < 0 || guest->said.size() < kHalf) continue;
    for (auto& [index, secret] : secrets_) {
      if (secret.empty() || !equal_in_constant_time(guest->said, secret.substr(0, kHalf))) continue;
      const std::string answer = secret.substr(kHalf);
      if (send(guest->socket, answer.data(), answer.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(answer.size())) break;
      on_connected_(index, guest->socket);
      guest->socket = -1;
      secret.clear();  // used once
      break;
    }
  }
  std::erase_if(guests_, [](const auto& guest) { return guest->socket < 0; });
  if (listener_ < 0 || secrets_.size() < num_expected_) return;
  for (const auto& [index, secret] : secrets_) {
    if (!secret.empty()) return;
  }
  ::close(listener_);
  listener_ = -1;
}

void PdshHub::close(Clock::time_point limit) {
  while (!pdsh_->status() && Clock::now() < limit) {
    int status = 0;
    if (waitpid(pdsh_->pid(), &status, WNOHANG) == pdsh_->pid()) return pdsh_->record_exit({WEXITSTATUS(status), 0});
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

int connect_back(int port, int host_index) {
  const char* session = std::getenv("SSH_CONNECTION");
  const std::string from = session ? session : "";
  const std::string launcher = from.substr(0, from.find(' '));
  if (launcher.empty()) throw std::runtime_error("SSH_CONNECTION is not set: --connect is for agents started over ssh");
  const std::string secret = random_hex(kHalf);
  const std::string line = kMark + std::to_string(host_index) + " " + secret + "\n";
  if (write(STDOUT_FILENO, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    throw std::runtime_error("cannot write to the launcher");
  }
  const int socket = connect_to(launcher, port);
  const std::string first = secret.substr(0, kHalf);
  if (send(socket, first.data(), first.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(first.size()) ||
      !equal_in_constant_time(read_exactly(socket, kHalf), secret.substr(kHalf))) {
    throw std::runtime_error("the program at the launcher's port does not know the secret");
  }
  return socket;
}

}  // namespace deeptide::launch
