// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Asks the kernel what this host has left.
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <filesystem>
#include <fstream>

#include "deeptide/plan.h"
#include "device/memory/memory_limit.h"

namespace deeptide {

namespace {

/// "MemAvailable:  16384 kB" of /proc/meminfo, in bytes.
int64_t available_memory() {
  std::ifstream lines("/proc/meminfo");
  std::string name, rest;
  int64_t kib = 0;
  while (lines >> name >> kib) {
    if (name == "MemAvailable:") return kib * 1024;
    std::getline(lines, rest);
  }
  return 0;
}

std::optional<int64_t> free_bytes_at(const std::string& path) {
  struct statvfs space = {};
  if (::statvfs(path.c_str(), &space) != 0) return std::nullopt;
  return static_cast<int64_t>(space.f_bavail) * static_cast<int64_t>(space.f_frsize);
}

/// The folder, or the nearest one above it that is there: initialize makes the others.
std::string existing(const std::string& folder) {
  auto path = std::filesystem::absolute(folder).lexically_normal();
  std::error_code ignored;
  while (!std::filesystem::exists(path, ignored) && path.has_relative_path()) path = path.parent_path();
  return path.string();
}

FolderSpace space_of(const std::string& folder) {
  const std::string at = existing(folder);
  struct stat status = {};
  const uint64_t device = ::stat(at.c_str(), &status) == 0 ? static_cast<uint64_t>(status.st_dev) : 0;
  return {folder, free_bytes_at(at).value_or(0), device};
}

}  // namespace

MachineLimits machine_limits(const std::vector<std::string>& folders) {
  MachineLimits machine{.memory_bytes = available_memory(), .bound = "available memory"};
  const auto group = device::tightest_memory_limit();
  if (group && group->left < machine.memory_bytes) {
    machine.memory_bytes = group->left;
    machine.bound = "the limit of " + group->group;
  }
  machine.shared_memory_bytes = free_bytes_at("/dev/shm");
  struct rlimit locked = {};
  if (::getrlimit(RLIMIT_MEMLOCK, &locked) == 0 && locked.rlim_cur != RLIM_INFINITY) {
    machine.lockable_bytes = static_cast<int64_t>(locked.rlim_cur);
  }
  for (const std::string& folder : folders) machine.folders.push_back(space_of(folder));
  return machine;
}

}  // namespace deeptide
