// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds the ranks of one host through the store, and watches their processes.
#include "host/host.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/interrupt.h"
#include "base/invariant.h"
#include "base/log.h"
#include "base/text.h"
#include "device/parallel.h"
#include "host/memory_appeal.h"
#include "world/failure_board.h"

namespace deeptide::host {

using device::SharedMemory;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr int64_t kSignalBytesPerRank = 16 << 20;  // reserved, not taken
constexpr int64_t kLine = 128;                     // two cache lines: what one rank writes disturbs no other
constexpr milliseconds kShortestNap{1}, kLongestNap{20};

std::string inode(const char* path) {
  struct stat status {};
  return ::stat(path, &status) == 0 ? std::to_string(status.st_ino) : "?";
}

/// Equal for two processes exactly if they may share memory and count as one host: containers with a network of their
/// own count as hosts.
std::string host_identity(const World& world) {
  if (!world.host.empty()) return world.host;
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot + "/" + inode("/proc/self/ns/net") + "/" + inode("/proc/self/ns/pid") + "/" + std::to_string(::geteuid());
}

/// A rank's report about itself. Its host's name is last, because it may contain any character.
struct Place {
  int pid;
  bool enabled;
  std::string host;

  std::string line() const {
    std::string name = host;
    std::replace(name.begin(), name.end(), '\n', ' ');
    return std::to_string(pid) + " " + (enabled ? "1" : "0") + " " + name;
  }
  static Place parse(const std::string& line) {
    const size_t first = line.find(' ');
    return {std::stoi(line), line.at(first + 1) == '1', line.substr(first + 3)};
  }
};

/// The signal memory of a host's ranks; while it is there, this rank gives idle memory to the others.
struct Signals {
  Signals(std::shared_ptr<SharedMemory> shared, char* lines, int size, int index)
      : memory(std::move(shared)), appeal(memory, lines, size, index) {}
  const std::shared_ptr<SharedMemory> memory;
  MemoryAppeal appeal;
};

/// Assumes that ranks bound to cores were given different cores.
bool has_cores_for(int num_ranks) {
  const int cores = num_cores();
  return cores >= num_ranks || cores < ::sysconf(_SC_NPROCESSORS_ONLN);
}

}  // namespace

Host::Host(const World& world, std::string prefix, std::shared_ptr<world::FailureBoard> board, std::vector<int> numbers)
    : world_(world), prefix_(std::move(prefix)), board_(std::move(board)), numbers_(std::move(numbers)) {}

Host::~Host() = default;

/// Returns the key's value once it is set.
std::string Host::await(const std::string& key) const {
  auto& store = *world_.store;
  const auto begin = steady_clock::now();
  auto nap = kShortestNap;
  for (auto look = begin + world::kPollFailures; !store.check({key}); nap = std::min(2 * nap, kLongestNap)) {
    const auto now = steady_clock::now();
    if (now > begin + store.getTimeout()) {
      throw CommError("no answer within " + std::to_string(store.getTimeout().count()) + " ms, the store's timeout");
    }
    if (now > look) {
      look = now + world::kPollFailures;
      auto failure = find_dead();
      if (!failure && board_) failure = board_->failure();
      if (failure && !store.check({key})) throw CommError(*failure);  // the key may have been set before the failure
      check_interrupts();
    }
    std::this_thread::sleep_for(nap);
  }
  return to_text(store.get(key));
}

/// Gathers each rank's line, by rank. Rank 0 collects them, so that the store answers W + 1 reads, not W * W.
std::vector<std::string> Host::gather_lines(const std::string& prefix, const std::string& own) const {
  world_.store->set(prefix + "/" + std::to_string(world_.rank), to_bytes(own));
  if (world_.rank == 0) {
    std::string all;
    for (int r = 0; r < world_.size; ++r) all += (r ? "\n" : "") + await(prefix + "/" + std::to_string(r));
    world_.store->set(prefix + "/all", to_bytes(all));
  }
  return split(await(prefix + "/all"), '\n');
}

std::shared_ptr<Host> Host::find(const World& world, const std::string& prefix, bool enabled,
                                 std::shared_ptr<world::FailureBoard> board, std::vector<int> numbers) {
  auto host = std::shared_ptr<Host>(new Host(world, prefix, board, numbers));
  std::vector<std::string> lines;
  const std::string own = Place{::getpid(), enabled, host_identity(world)}.line();
  if (world.size > 1) {
    const auto explain = [&](const std::exception& error) {
      return CommError("rank " + std::to_string(host->number(world.rank)) + " of " + std::to_string(world.size) +
                       " could not learn where the other ranks run: " + std::string(error.what()).substr(0, 300) +
                       ". Check that all ranks have been started.");
    };
    try {  // what a signal's handler throws passes
      lines = host->gather_lines(prefix, own);
    } catch (const CommError& error) {
      throw explain(error);
    } catch (const c10::Error& error) {  // the store's
      throw explain(error);
    }
  } else {
    lines = {own};
  }
  std::vector<Place> places;
  for (const auto& line : lines) places.push_back(Place::parse(line));
  const bool all_enabled = std::all_of(places.begin(), places.end(), [](const auto& place) { return place.enabled; });
  std::map<std::string, int> known;
  for (int r = 0; r < world.size; ++r) {
    const std::string key = all_enabled ? places[r].host : std::to_string(r);
    const auto [at, is_new] = known.emplace(key, static_cast<int>(host->hosts_.size()));
    if (is_new) host->hosts_.emplace_back();
    host->hosts_[at->second].push_back(r);
    if (r == world.rank) host->host_index_ = at->second;
  }
  host->ranks_ = host->hosts_[host->host_index_];
  host->index_ =
      static_cast<int>(std::find(host->ranks_.begin(), host->ranks_.end(), world.rank) - host->ranks_.begin());
  host->core_each_ = has_cores_for(host->size());
  std::vector<std::pair<int, int>> pids;
  for (int r = 0; r < world.size && world.size > 1; ++r) {
    if (places[r].host == places[world.rank].host) pids.emplace_back(host->number(r), places[r].pid);
  }
  host->watch_processes(pids);
  if (host->hosts_.size() == static_cast<size_t>(world.size)) return host;
  const std::string why_not = host->connect();
  for (const auto& line : host->gather_lines(prefix + "/connected", why_not.empty() ? "ok" : why_not)) {
    if (line == "ok") continue;
    if (world.rank == 0) log(LogLevel::warning, "ranks of one host communicate over the network: " + line);
    return find(world, prefix + "/apart", /*enabled=*/false, std::move(board), std::move(numbers));
  }
  return host;
}

bool Host::is_uniform() const {
  return std::all_of(hosts_.begin(), hosts_.end(), [&](const auto& h) { return h.size() == hosts_.front().size(); });
}

bool Host::is_in_order() const {
  int next = 0;
  for (const auto& host : hosts_) {
    for (const int rank : host) {
      if (rank != next++) return false;
    }
  }
  return is_uniform();
}

std::string Host::text() const {
  const size_t num_hosts = hosts_.size();
  if (num_hosts == static_cast<size_t>(world_.size)) return "no two ranks share memory, network";
  std::string sizes = std::to_string(hosts_.front().size());
  for (size_t h = 1; h < num_hosts && !is_uniform(); ++h) {
    sizes += (h + 1 == num_hosts ? " and " : ", ") + std::to_string(hosts_[h].size());
  }
  if (holds_all()) return "1 host of " + sizes + " ranks, shared memory";
  return std::to_string(num_hosts) + " hosts of " + sizes + " ranks, " +
         (is_uniform() ? "shared memory within" : "network");
}

std::string Host::connect() {
  std::string why_not;
  if (size() > 1) signals_ = share(kSignalBytesPerRank * size(), why_not);
  if (signals_) {
    char* place = reserve(sizeof(*first_killed_));
    take_pages(place, sizeof(*first_killed_));
    first_killed_ = reinterpret_cast<std::atomic<int32_t>*>(place);
    const int64_t lines = MemoryAppeal::bytes_for(size());
    place = reserve(lines);
    take_pages(place, lines);
    const auto signals = std::make_shared<Signals>(signals_, place, size(), index_);
    signals_ = std::shared_ptr<SharedMemory>(signals, signals->memory.get());
  }
  return why_not;
}

std::shared_ptr<SharedMemory> Host::share(int64_t size_bytes, std::string& why_not, const Check& check) {
  const std::string prefix = prefix_ + "/" + std::to_string(host_index_) + "/shared/" + std::to_string(num_shared_++);
  std::shared_ptr<SharedMemory> memory;
  std::string word = "ok";
  try {
    if (index_ == 0) memory = SharedMemory::create(size_bytes);
  } catch (const std::exception& error) {
    word = std::string("rank ") + std::to_string(number(world_.rank)) + ": " + error.what();
  }
  auto& store = *world_.store;
  if (index_ == 0) store.set(prefix, to_bytes(memory ? memory->address() : ""));
  const std::string address = await(prefix);
  try {
    if (index_ != 0 && !address.empty()) memory = SharedMemory::open(address);
    if (memory && check) check(memory);
  } catch (const std::exception& error) {
    word = std::string("rank ") + std::to_string(number(world_.rank)) + ": " + error.what();
  }
  store.set(prefix + "/" + std::to_string(index_), to_bytes(word));
  for (int i = 0; i < size(); ++i) {
    const std::string other = await(prefix + "/" + std::to_string(i));
    if (other != "ok" && why_not.empty()) why_not = other.substr(0, other.find('\n'));
  }
  return why_not.empty() ? memory : nullptr;
}

char* Host::reserve(int64_t size_bytes) {
  const int64_t begin = reserved_;
  reserved_ += (size_bytes + kLine - 1) / kLine * kLine;
  DEEPTIDE_INVARIANT(signals_ && reserved_ <= signals_->size(), "no room for signals: ", reserved_);
  return signals_->data() + begin;
}

void Host::take_pages(const char* begin, int64_t size_bytes) {
  signals_->populate(begin - signals_->data(), size_bytes);
}

void Host::watch_processes(const std::vector<std::pair<int, int>>& pids) {
  for (const auto& [rank, pid] : pids) processes_.push_back({rank, ProcessWatch(pid)});
  if (processes_.empty() || processes_.front().rank != number(world_.rank)) return;
  const auto worst = std::max_element(processes_.begin(), processes_.end(), [](const auto& one, const auto& other) {
    return one.process.by() < other.process.by();
  });
  if (worst->process.by() == WatchBy::descriptor) return;
  const bool sees_all = worst->process.by() == WatchBy::start_time;
  log(sees_all ? LogLevel::info : LogLevel::warning,
      std::string("the ranks of this host watch each other through ") +
          (sees_all ? "/proc" : "signals, and notice a dead rank only once its parent has waited for it") + " (" +
          worst->process.why_not() + ")");
}

std::string Host::end_of(const Watched& watched) const {
  const std::string rank = board_ ? board_->name(watched.rank) : "rank " + std::to_string(watched.rank);
  return rank + "'s process " + std::to_string(watched.process.pid()) + " has ended";
}

std::optional<std::string> Host::find_dead() const {
  for (const auto& watched : processes_) {
    if (watched.process.pid() != ::getpid() && watched.process.has_ended()) return end_of(watched);
  }
  return std::nullopt;
}

std::optional<int> Host::find_process(int rank) const {
  for (const auto& watched : processes_) {
    const bool is_other = watched.rank == rank && watched.process.pid() != ::getpid();  // ranks may be threads
    if (is_other && !watched.process.has_ended()) return watched.process.pid();
  }
  return std::nullopt;
}

std::optional<std::string> Host::find_killed() const {
  const Watched* first = nullptr;
  std::string all;
  bool asked = true;
  for (const auto& watched : processes_) {
    if (watched.process.pid() == ::getpid() || !watched.process.has_ended()) continue;
    try {
      if (board_ && board_->has_ended(watched.rank)) continue;
    } catch (const std::exception&) {  // the store's host is gone
      asked = false;
    }
    if (first == nullptr) first = &watched;
    all += (all.empty() ? "" : ", ") + end_of(watched);
  }
  if (first == nullptr) return std::nullopt;
  int32_t known = first_killed_ ? first_killed_->load() : 0;
  if (known == 0 && !asked) return all;
  if (known == 0 && (!first_killed_ || first_killed_->compare_exchange_strong(known, first->rank + 1))) {
    return end_of(*first);
  }
  const auto is_known = [&](const auto& watched) { return watched.rank + 1 == known; };
  return end_of(*std::find_if(processes_.begin(), processes_.end(), is_known));
}

}  // namespace deeptide::host
