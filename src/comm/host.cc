// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finding the ranks of one host through the store, and watching their processes.
#include "comm/host.h"

#include <poll.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/log.h"

namespace deeptide::comm {

using device::SharedMemory;

namespace {

constexpr int64_t kSignalBytesPerRank = 16 << 20;  // reserved, not taken
constexpr int64_t kLine = 128;                     // two cache lines: what one rank writes disturbs no other

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string read(c10d::Store& store, const std::string& key) {
  const auto value = store.get(key);
  return {value.begin(), value.end()};
}

std::string inode(const char* path) {
  struct stat status{};
  return ::stat(path, &status) == 0 ? std::to_string(status.st_ino) : "?";
}

/// Equal for two processes exactly when they may share memory and would be called one host: containers with a network
/// of their own count as hosts.
std::string host_identity(const World& world) {
  if (!world.host.empty()) return world.host;
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot + "/" + inode("/proc/self/ns/net") + "/" + inode("/proc/self/ns/pid") + "/" + std::to_string(::geteuid());
}

/// Ranks that are bound to cores are taken to have been given different ones.
bool has_cores_for(int num_ranks) {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return false;
  return CPU_COUNT(&set) >= num_ranks || CPU_COUNT(&set) < ::sysconf(_SC_NPROCESSORS_ONLN);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

/// Everybody's line, by rank: each leaves its own, rank 0 collects, so that the store answers W + 1 reads, not W * W.
std::vector<std::string> gather_lines(const World& world, const std::string& prefix, const std::string& own) {
  world.store->set(prefix + "/" + std::to_string(world.rank), bytes(own));
  if (world.rank == 0) {
    std::string all;
    for (int r = 0; r < world.size; ++r) all += (r ? "\n" : "") + read(*world.store, prefix + "/" + std::to_string(r));
    world.store->set(prefix + "/all", bytes(all));
  }
  return split(read(*world.store, prefix + "/all"), '\n');
}

}  // namespace

Host::Host(const World& world, std::string prefix) : world_(world), prefix_(std::move(prefix)) {}

Host::~Host() {
  for (int handle : process_handles_) {
    if (handle >= 0) ::close(handle);
  }
}

std::shared_ptr<Host> Host::find(const World& world, const std::string& prefix, bool enabled) {
  auto host = std::shared_ptr<Host>(new Host(world, prefix));
  std::vector<std::string> lines(world.size);
  const std::string own = host_identity(world) + " " + std::to_string(::getpid()) + " " + (enabled ? "1" : "0");
  if (world.size > 1) {
    try {
      lines = gather_lines(world, prefix, own);
    } catch (const std::exception& error) {
      throw CommError("rank " + std::to_string(world.rank) + " of " + std::to_string(world.size) +
                      " could not learn where the other ranks run: " + std::string(error.what()).substr(0, 300) +
                      ". Check that all ranks have been started.");
    }
  } else {
    lines = {own};
  }
  const bool all_enabled = std::all_of(lines.begin(), lines.end(), [](const auto& line) { return line.back() == '1'; });
  std::map<std::string, int> known;
  std::vector<int> pids;
  for (int r = 0; r < world.size; ++r) {
    const auto fields = split(lines[r], ' ');
    pids.push_back(std::stoi(fields.at(fields.size() - 2)));
    const std::string key = all_enabled ? fields[0] : std::to_string(r);
    const auto [at, is_new] = known.emplace(key, static_cast<int>(host->hosts_.size()));
    if (is_new) host->hosts_.emplace_back();
    host->hosts_[at->second].push_back(r);
    if (r == world.rank) host->host_index_ = at->second;
  }
  host->ranks_ = host->hosts_[host->host_index_];
  host->index_ = static_cast<int>(std::find(host->ranks_.begin(), host->ranks_.end(), world.rank) -
                                  host->ranks_.begin());
  host->core_each_ = has_cores_for(host->size());
  for (int r : host->ranks_) host->pids_.push_back(pids[r]);
  if (host->hosts_.size() == static_cast<size_t>(world.size)) return host;
  const std::string why_not = host->connect();
  for (const auto& line : gather_lines(world, prefix + "/connected", why_not.empty() ? "ok" : why_not)) {
    if (line == "ok") continue;
    if (world.rank == 0) log(LogLevel::warning, "ranks of one host talk over the network: " + line);
    return find(world, prefix + "/apart", /*enabled=*/false);
  }
  return host;
}

bool Host::is_uniform() const {
  return std::all_of(hosts_.begin(), hosts_.end(), [&](const auto& h) { return h.size() == hosts_.front().size(); });
}

std::string Host::connect() {
  std::string why_not;
  if (size() > 1) signals_ = share(kSignalBytesPerRank * size(), why_not);
  watch_processes(pids_);
  return why_not;
}

std::shared_ptr<SharedMemory> Host::share(int64_t size_bytes, std::string& why_not) {
  const std::string prefix = prefix_ + "/" + std::to_string(host_index_) + "/shared/" + std::to_string(num_shared_++);
  std::shared_ptr<SharedMemory> memory;
  std::string word = "ok";
  try {
    if (index_ == 0) memory = SharedMemory::create(size_bytes);
  } catch (const std::exception& error) {
    word = std::string("rank ") + std::to_string(world_.rank) + ": " + error.what();
  }
  auto& store = *world_.store;
  if (index_ == 0) store.set(prefix, bytes(memory ? memory->address() : ""));
  const std::string address = read(store, prefix);
  try {
    if (index_ != 0 && !address.empty()) memory = SharedMemory::open(address);
  } catch (const std::exception& error) {
    word = std::string("rank ") + std::to_string(world_.rank) + ": " + error.what();
  }
  store.set(prefix + "/" + std::to_string(index_), bytes(word));
  for (int i = 0; i < size(); ++i) {
    const std::string other = read(store, prefix + "/" + std::to_string(i));
    if (other != "ok" && why_not.empty()) why_not = other.substr(0, other.find('\n'));
  }
  return why_not.empty() ? memory : nullptr;
}

char* Host::reserve(int64_t size_bytes) {
  const int64_t begin = reserved_;
  reserved_ += (size_bytes + kLine - 1) / kLine * kLine;
  TORCH_INTERNAL_ASSERT(signals_ && reserved_ <= signals_->size(), "no room for signals: ", reserved_);
  return signals_->data() + begin;
}

void Host::watch_processes(const std::vector<int>& pids) {
  for (int pid : pids) {
    int handle = -1;
#ifdef SYS_pidfd_open
    if (pid != ::getpid()) handle = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
#endif
    process_handles_.push_back(handle);
  }
}

std::optional<std::string> Host::find_dead() const {
  for (size_t i = 0; i < process_handles_.size(); ++i) {
    if (process_handles_[i] < 0) continue;
    pollfd entry{process_handles_[i], POLLIN, 0};
    if (::poll(&entry, 1, 0) > 0) {
      return "rank " + std::to_string(ranks_[i]) + "'s process " + std::to_string(pids_[i]) + " has ended";
    }
  }
  return std::nullopt;
}

}  // namespace deeptide::comm
