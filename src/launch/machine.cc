// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// What this machine offers to a job, from /dev, the scheduler and the socket layer.
#include "launch/machine.h"

#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "launch/options.h"

namespace deeptide::launch {
namespace {

namespace fs = std::filesystem;

bool is_device_node(const std::string& name) {
  constexpr std::string_view kPrefix = "nvidia";
  return name.size() > kPrefix.size() && name.compare(0, kPrefix.size(), kPrefix) == 0 &&
         std::all_of(name.begin() + kPrefix.size(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool is_executable(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored) && access(path.c_str(), X_OK) == 0;
}

// The environment whose bin/ holds this binary, so that .venv/bin/deeptide works without activation.
fs::path own_environment() {
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  if (error) return {};
  const fs::path root = self.parent_path().parent_path();
  return fs::exists(root / "pyvenv.cfg", error) ? root : fs::path{};
}

}  // namespace

int count_devices(const std::string& device_dir, const char* visible) {
  int present = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(device_dir, error)) {
    present += is_device_node(entry.path().filename().string());
  }
  if (!visible) return present;
  int listed = 0;
  std::istringstream list(visible);
  // As the driver reads it: the list ends at the first entry that is no device.
  for (std::string entry; std::getline(list, entry, ',') && !entry.empty() && entry[0] != '-';) ++listed;
  return std::min(present, listed);
}

std::vector<int> usable_cores() {
  std::vector<int> cores;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &set)) cores.push_back(core);
    }
  }
  if (cores.empty()) cores.push_back(0);
  return cores;
}

int choose_port(int wanted) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0) throw UsageError(std::string("cannot open a socket: ") + std::strerror(errno));
  // As the rendezvous itself binds: on every interface, and over connections that only linger in TIME_WAIT.
  const int reuse = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  address.sin_port = htons(static_cast<uint16_t>(wanted));
  socklen_t length = sizeof(address);
  const bool free = bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(listener, 1) == 0 &&
                    getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  const int error = errno;
  close(listener);
  if (!free) {
    throw UsageError("--master_port " + std::to_string(wanted) + " cannot be used: " + std::strerror(error) +
                     "; choose another port, or leave the option out for a free one");
  }
  return ntohs(address.sin_port);
}

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "/usr/local/bin:/usr/bin:/bin");
  for (std::string folder; std::getline(folders, folder, ':');) {
    const fs::path candidate = fs::path(folder.empty() ? "." : folder) / name;
    if (is_executable(candidate)) return candidate.string();
  }
  return {};
}

std::string find_python() {
  const char* active = std::getenv("VIRTUAL_ENV");
  for (const fs::path& root : {fs::path(active ? active : ""), own_environment()}) {
    if (!root.empty() && is_executable(root / "bin" / "python3")) return (root / "bin" / "python3").string();
  }
  std::string found = find_program("python3");
  if (found.empty()) throw UsageError("no python3 in PATH; activate an environment or give --python PATH");
  return found;
}

}  // namespace deeptide::launch
