// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A control group with a limit on memory, as a container has one.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace deeptide {

/// Made below the machine's groups, which takes root; removed at the end, when its processes have ended.
class ControlGroup {
 public:
  explicit ControlGroup(int64_t bytes) {
    const std::string one = "/sys/fs/cgroup/memory", two = "/sys/fs/cgroup";
    const bool is_one = std::filesystem::is_directory(one);
    std::error_code error;
    folder_ = (is_one ? one : two) + "/deeptide-" + std::to_string(::getpid());
    std::filesystem::create_directory(folder_, error);
    is_there_ = !error && write(is_one ? "memory.limit_in_bytes" : "memory.max", bytes) && !machine_swaps();
  }
  ~ControlGroup() {
    std::error_code error;
    std::filesystem::remove(folder_, error);
  }
  ControlGroup(const ControlGroup&) = delete;

  /// False without the right to make one, and where swap makes a limit soft.
  bool is_there() const { return is_there_; }
  /// Takes this process in.
  bool enter() const { return write("cgroup.procs", ::getpid()); }

 private:
  bool write(const std::string& file, int64_t value) const {
    std::ofstream stream(folder_ + "/" + file);
    stream << value << std::flush;
    return stream.good();
  }
  static bool machine_swaps() {
    std::ifstream stream("/proc/swaps");
    std::string heading, line;
    std::getline(stream, heading);
    return static_cast<bool>(std::getline(stream, line));
  }

  std::string folder_;
  bool is_there_ = false;
};

}  // namespace deeptide
