// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Answers one question per connection over an abstract Unix socket.
#include "launch/watch/job_socket.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

constexpr size_t kMaxQuestion = 320;  // a word, a number and a folder
constexpr int kQuestionMs = 200;      // a silent caller must not hold up the launcher

struct Address {
  sockaddr_un value{};
  socklen_t length = 0;

  explicit Address(const std::string& name) {
    value.sun_family = AF_UNIX;
    const size_t size = std::min(name.size(), sizeof value.sun_path - 1);
    std::memcpy(value.sun_path + 1, name.data(), size);  // a leading zero byte makes the name abstract
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&value); }
};

void set_timeout(int fd, int milliseconds) {
  const timeval limit{milliseconds / 1000, (milliseconds % 1000) * 1000};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

bool is_own_user(int fd) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return false;
  return peer.uid == ::geteuid() || peer.uid == 0;
}

void send_all(int fd, const std::string& text) {
  for (size_t sent = 0; sent < text.size();) {
    const ssize_t now = ::send(fd, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (now <= 0) return;
    sent += static_cast<size_t>(now);
  }
}

}  // namespace

Caller::~Caller() {
  if (fd_ >= 0) ::close(fd_);
}

Caller::Caller(Caller&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

void Caller::answer(const std::string& text) { send_all(fd_, text); }

JobSocket::JobSocket(pid_t job, Serve serve) : serve_(std::move(serve)) {
  fd_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const Address address("deeptide/" + std::to_string(::geteuid()) + "/" + std::to_string(job));
  if (fd_ >= 0 && (::bind(fd_, address.get(), address.length) != 0 || ::listen(fd_, 4) != 0)) {
    ::close(fd_);
    fd_ = -1;
  }
}

JobSocket::~JobSocket() {
  if (fd_ >= 0) ::close(fd_);
}

void JobSocket::add_to(PollSet& set) {
  if (fd_ >= 0) set.add(fd_, POLLIN, [this] { accept_one(); });
}

void JobSocket::accept_one() {
  const int fd = ::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0) return;
  Caller caller(fd);
  set_timeout(fd, kQuestionMs);
  char question[kMaxQuestion] = {};
  if (is_own_user(fd) && ::recv(fd, question, sizeof question - 1, 0) > 0) serve_(question, std::move(caller));
}

std::vector<LiveJob> live_jobs() {
  std::vector<LiveJob> jobs;
  std::ifstream sockets("/proc/net/unix");
  const std::string own = "@deeptide/" + (::geteuid() == 0 ? "" : std::to_string(::geteuid()) + "/");
  for (std::string line; std::getline(sockets, line);) {
    const size_t at = line.find(own);
    if (at == std::string::npos) continue;
    const std::string name = line.substr(at + 1);
    const LiveJob job{name.substr(name.rfind('/') + 1), name};
    const bool known = std::any_of(jobs.begin(), jobs.end(), [&](const LiveJob& j) { return j.socket == name; });
    if (!known) jobs.push_back(job);
  }
  return jobs;
}

LiveJob find_job(const std::string& id) {
  const std::vector<LiveJob> jobs = live_jobs();
  if (id.empty() && jobs.size() == 1) return jobs.front();
  std::string ids;
  for (const LiveJob& job : jobs) {
    if (job.id == id) return job;
    ids += (ids.empty() ? "" : ", ") + job.id;
  }
  if (jobs.empty())
    throw UsageError("no live job of this user was launched on this machine; run this command where its launcher runs");
  if (id.empty()) throw UsageError("several jobs are live; choose one of: " + ids);
  throw UsageError("no live job " + id + "; live jobs: " + ids);
}

std::string ask(const LiveJob& job, const std::string& request, int timeout_s) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return "";
  set_timeout(fd, timeout_s * 1000);
  std::string answer;
  const Address address(job.socket);
  if (::connect(fd, address.get(), address.length) == 0) {
    send_all(fd, request);
    char buffer[4096];
    for (ssize_t got; (got = ::recv(fd, buffer, sizeof buffer, 0)) > 0;)
      answer.append(buffer, static_cast<size_t>(got));
  }
  ::close(fd);
  return answer;
}

}  // namespace deeptide::launch
