// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Transfers files with O_DIRECT, one thread per file, through the chosen engine.
#include "launch/commands/bench/io_bench.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <system_error>
#include <vector>

#include "io/io_engine.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

constexpr int64_t kAlignment = 4096;  // required by O_DIRECT; sufficient on all current devices
constexpr int kMaxRequests = 4096;    // in flight over all files; each takes a buffer and, with threads, a thread

/// Page-aligned memory with a pattern that encodes the offset in the file.
class Block {
 public:
  explicit Block(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    memory_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "a buffer for one block");
  }
  ~Block() { ::munmap(memory_, bytes_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void fill(int64_t offset) {
    auto* words = static_cast<int64_t*>(memory_);
    for (size_t i = 0; i < bytes_ / sizeof(int64_t); ++i) words[i] = offset + static_cast<int64_t>(i);
  }
  bool holds(int64_t offset) const {
    const auto* words = static_cast<const int64_t*>(memory_);
    for (size_t i = 0; i < bytes_ / sizeof(int64_t); ++i) {
      if (words[i] != offset + static_cast<int64_t>(i)) return false;
    }
    return true;
  }
  void* data() { return memory_; }
  size_t size() const { return bytes_; }

 private:
  size_t bytes_;
  void* memory_;
};

using Transfer = void (*)(const io::Pass& pass);

/// One file, which the destructor removes.
class BenchFile {
 public:
  BenchFile(const IoBench& bench, Transfer transfer, int index) : bench_(bench), transfer_(transfer) {
    pass_.path = bench.folder + "/deeptide-bench-" + std::to_string(::getpid()) + "-" + std::to_string(index);
    open_file();
    pass_.bytes = bench.io_bytes;
    pass_.block_bytes = bench.block_bytes;
    for (int64_t i = 0; i < std::min<int64_t>(bench.queue_depth, bench.io_bytes / bench.block_bytes); ++i) {
      blocks_.push_back(std::make_unique<Block>(bench.block_bytes));
      blocks_.back()->fill(0);  // zeros might not reach the device
      pass_.blocks.push_back(blocks_.back()->data());
    }
    pass_.prepare = [this](size_t buffer, int64_t at) {
      if (bench_.validate) blocks_[buffer]->fill(at);  // costs time, so not in a measurement
    };
    pass_.inspect = [this](size_t buffer, int64_t at) {
      if (!bench_.validate || blocks_[buffer]->holds(at)) return;
      throw std::runtime_error(pass_.path + ": the data read at offset " + std::to_string(at) +
                               " differs from the data written");
    };
  }
  ~BenchFile() { close_file(); }
  BenchFile(const BenchFile&) = delete;
  BenchFile& operator=(const BenchFile&) = delete;

  void write_all() {
    pass_.read = false;
    transfer_(pass_);
    if (::fsync(pass_.fd) != 0) throw std::system_error(errno, std::generic_category(), pass_.path);
  }

  void read_all() {
    pass_.read = true;
    transfer_(pass_);
  }

  /// Drops cached pages before a read, for files without O_DIRECT.
  void drop_pages() const { ::posix_fadvise(pass_.fd, 0, 0, POSIX_FADV_DONTNEED); }
  bool direct() const { return direct_; }

 private:
  void open_file() {
    constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
    const char* const path = pass_.path.c_str();
    if (direct_) pass_.fd = ::open(path, kFlags | O_DIRECT, 0600);
    if (direct_ && pass_.fd < 0 && errno == EINVAL) direct_ = false;
    if (!direct_) pass_.fd = ::open(path, kFlags, 0600);
    if (pass_.fd < 0) throw std::system_error(errno, std::generic_category(), pass_.path);
    // A growing file takes one write at a time, so allocate it first where the file system can.
    if (::fallocate(pass_.fd, 0, 0, bench_.io_bytes) == 0 || errno == EOPNOTSUPP) return;
    const int error = errno;
    close_file();
    throw std::system_error(error, std::generic_category(), pass_.path);
  }
  void close_file() const {
    ::close(pass_.fd);
    ::unlink(pass_.path.c_str());
  }

  const IoBench& bench_;
  const Transfer transfer_;
  bool direct_ = bench_.direct;
  std::vector<std::unique_ptr<Block>> blocks_;
  io::Pass pass_;
};

using Files = std::vector<std::unique_ptr<BenchFile>>;

double time_loop(Files& files, void (BenchFile::*action)()) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::future<void>> threads;
  for (const auto& file : files) threads.push_back(std::async(std::launch::async, action, file.get()));
  for (auto& thread : threads) thread.wait();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (auto& thread : threads) thread.get();
  return seconds;
}

void check(const IoBench& bench) {
  if (bench.block_bytes < kAlignment || bench.block_bytes % kAlignment != 0) {
    throw UsageError("--block_size must be a multiple of 4096, got " + std::to_string(bench.block_bytes));
  }
  if (bench.io_bytes < bench.block_bytes || bench.io_bytes % bench.block_bytes != 0) {
    throw UsageError("--io_size must be a multiple of --block_size, got " + std::to_string(bench.io_bytes) + " and " +
                     std::to_string(bench.block_bytes));
  }
  if (bench.num_files * bench.queue_depth > kMaxRequests) {
    throw UsageError("--io_parallel " + std::to_string(bench.num_files) + " times --queue_depth " +
                     std::to_string(bench.queue_depth) + " exceeds the limit of " + std::to_string(kMaxRequests) +
                     " requests");
  }
}

/// Sets the result's engine, and the reason if it is not io_uring.
void choose_engine(const IoBench& bench, IoResult& result) {
  if (bench.engine != IoEngine::threads) result.obstacle = io::io_uring_obstacle();
  if (bench.engine == IoEngine::io_uring && !result.obstacle.empty()) {
    throw UsageError("--engine io_uring cannot be used: " + result.obstacle +
                     "; run `deeptide doctor` for the cure, or use --engine threads");
  }
  const bool threads = bench.engine == IoEngine::threads || !result.obstacle.empty();
  result.engine = threads ? IoEngine::threads : IoEngine::io_uring;
}

}  // namespace

IoResult run_io_bench(const IoBench& bench) {
  check(bench);
  IoResult result;
  choose_engine(bench, result);
  const Transfer transfer = result.engine == IoEngine::io_uring ? io::transfer_by_io_uring : io::transfer_by_threads;
  Files files;
  for (int i = 0; i < bench.num_files; ++i) files.push_back(std::make_unique<BenchFile>(bench, transfer, i));
  result.bytes = bench.io_bytes * bench.num_files;
  result.direct = files.front()->direct();
  if (bench.read) time_loop(files, &BenchFile::write_all);
  for (int loop = 0; loop < bench.num_loops; ++loop) {
    for (const auto& file : files) file->drop_pages();
    const double seconds = time_loop(files, bench.read ? &BenchFile::read_all : &BenchFile::write_all);
    result.best_s = loop == 0 ? seconds : std::min(result.best_s, seconds);
  }
  return result;
}

int64_t parse_size(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string unit(end, text.data() + text.size());
  const std::string units = "KMG";
  const size_t place = unit.size() == 1 ? units.find(unit) : std::string::npos;
  const int shift = unit.empty() ? 0 : static_cast<int>(10 * (place + 1));
  if (error != std::errc() || value <= 0 || (!unit.empty() && place == std::string::npos) ||
      value > INT64_MAX >> shift) {
    throw UsageError("invalid size '" + text + "': expected a number of bytes such as 400M, 1G or 4096");
  }
  return value << shift;
}

}  // namespace deeptide::launch
