// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads this machine's resources from /dev, the scheduler and the socket layer.
#include "launch/machine/machine.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "launch/system/usage_error.h"

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

// Returns the environment whose bin/ holds this binary, so that .venv/bin/deeptide works without activation.
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
  // Reads the list as the driver does: it ends at the first entry that is not a device.
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

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses, later;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  for (const ifaddrs* entry = list; entry; entry = entry->ifa_next) {
    if (!entry->ifa_addr || (entry->ifa_flags & IFF_LOOPBACK) || !(entry->ifa_flags & IFF_UP)) continue;
    char text[INET6_ADDRSTRLEN] = "";
    if (entry->ifa_addr->sa_family == AF_INET) {
      inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in*>(entry->ifa_addr)->sin_addr, text, sizeof(text));
      addresses.push_back(text);
    } else if (entry->ifa_addr->sa_family == AF_INET6) {
      const auto& address = reinterpret_cast<sockaddr_in6*>(entry->ifa_addr)->sin6_addr;
      if (IN6_IS_ADDR_LINKLOCAL(&address)) continue;
      inet_ntop(AF_INET6, &address, text, sizeof(text));
      later.push_back(text);
    }
  }
  freeifaddrs(list);
  addresses.insert(addresses.end(), later.begin(), later.end());
  return addresses;
}

bool is_this_machine(const std::string& name) {
  char own[256] = "";
  gethostname(own, sizeof(own) - 1);
  if (name == "localhost" || name == "127.0.0.1" || name == "::1" || name == own) return true;
  addrinfo* found = nullptr;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(name.c_str(), nullptr, &hints, &found) != 0) return false;
  const std::vector<std::string> mine = own_addresses();
  bool here = false;
  for (const addrinfo* entry = found; entry && !here; entry = entry->ai_next) {
    char text[INET6_ADDRSTRLEN] = "";
    getnameinfo(entry->ai_addr, entry->ai_addrlen, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
    here = std::string_view(text).compare(0, 4, "127.") == 0 || std::find(mine.begin(), mine.end(), text) != mine.end();
  }
  freeaddrinfo(found);
  return here;
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
