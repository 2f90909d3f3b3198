// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads the files of control groups, version 2 and version 1.
#include "device/memory/memory_limit.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <sstream>
#include <vector>

#include "base/text.h"

namespace deeptide::device {
namespace {

using Number = std::optional<int64_t>;

constexpr int64_t kUnlimited = int64_t{1} << 60;  // version 1 writes a number close to 2^63

/// The files of one version, by what they tell.
struct Files {
  const char *controller, *folder;  // in /proc/self/cgroup, and below the root
  const char *limit, *used;
  std::vector<const char*> reclaimable;  // fields of memory.stat
};

const Files kVersions[] = {
    {"", "", "memory.max", "memory.current", {"inactive_file", "active_file", "slab_reclaimable"}},
    {"memory",
     "/memory",
     "memory.limit_in_bytes",
     "memory.usage_in_bytes",
     {"total_inactive_file", "total_active_file"}},
};

Number number_in(const std::string& path) {
  const std::string line = first_line_of(path);  // "max" is no number
  int64_t value = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value);
  return error == std::errc() && end != line.data() ? Number(value) : std::nullopt;
}

int64_t sum_of_fields(const std::string& path, const std::vector<const char*>& names) {
  std::ifstream stream(path);
  int64_t sum = 0;
  for (std::string line; std::getline(stream, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t value = 0;
    words >> name >> value;
    if (std::find(names.begin(), names.end(), name) != names.end()) sum += value;
  }
  return sum;
}

/// The path of this process's group: the line of its controller, "4:memory:/job" or "0::/job".
std::optional<std::string> path_of(const std::string& groups, const std::string& controller) {
  for (const std::string& line : split(groups, '\n')) {
    const auto parts = split(line, ':');
    if (parts.size() < 3) continue;
    const auto controllers = split(parts[1], ',');
    if (std::find(controllers.begin(), controllers.end(), controller) == controllers.end()) continue;
    return line.substr(parts[0].size() + parts[1].size() + 2);
  }
  return std::nullopt;
}

std::optional<MemoryLimit> limit_of(const std::string& folder, const Files& files, int64_t free_swap) {
  const Number limit = number_in(folder + "/" + files.limit), used = number_in(folder + "/" + files.used);
  if (!limit || !used || *limit >= kUnlimited) return std::nullopt;
  if (const Number swap = number_in(folder + "/memory.swap.max")) {  // only version 2 limits swap by itself
    const int64_t swapped = number_in(folder + "/memory.swap.current").value_or(0);
    free_swap = std::min(free_swap, std::max<int64_t>(0, *swap - swapped));
  }
  const int64_t reclaimable = sum_of_fields(folder + "/memory.stat", files.reclaimable);
  return MemoryLimit{folder, *limit, *limit - *used + reclaimable + free_swap};
}

}  // namespace

std::optional<MemoryLimit> tightest_memory_limit(const std::string& groups, const std::string& root,
                                                 int64_t free_swap) {
  std::optional<MemoryLimit> tightest;
  for (const Files& files : kVersions) {
    auto path = path_of(groups, files.controller);
    if (!path) continue;
    // A container sees its own group as the root, though /proc may name it by its path outside.
    for (std::string at = *path == "/" ? "" : *path;; at.resize(at.rfind('/'))) {
      const auto found = limit_of(root + files.folder + at, files, free_swap);
      if (found && (!tightest || found->left < tightest->left)) tightest = found;
      if (at.empty()) break;
    }
  }
  return tightest;
}

std::optional<MemoryLimit> tightest_memory_limit() {
  std::ifstream stream("/proc/self/cgroup");
  const std::string groups{std::istreambuf_iterator<char>(stream), {}};
  return tightest_memory_limit(groups, "/sys/fs/cgroup", 1024 * sum_of_fields("/proc/meminfo", {"SwapFree:"}));
}

}  // namespace deeptide::device
