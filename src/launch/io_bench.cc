// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// pread and pwrite with O_DIRECT, one file and one request at a time in each thread.
#include "launch/io_bench.h"

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

#include "launch/options.h"

namespace deeptide::launch {
namespace {

constexpr int64_t kAlignment = 4096;  // of O_DIRECT, on every device in use

/// Page-aligned memory with a pattern that names its place in the file.
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

/// One thread's file; removed with the object.
class BenchFile {
 public:
  BenchFile(const IoBench& bench, int index)
      : bench_(bench),
        path_(bench.folder + "/deeptide-bench-" + std::to_string(::getpid()) + "-" + std::to_string(index)) {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_DIRECT, 0600);
    if (fd_ < 0 && errno == EINVAL) {
      direct_ = false;
      fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    }
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), path_);
    block_ = std::make_unique<Block>(bench.block_bytes);
    block_->fill(0);  // zeros might not reach the device
  }
  ~BenchFile() {
    ::close(fd_);
    ::unlink(path_.c_str());
  }
  BenchFile(const BenchFile&) = delete;
  BenchFile& operator=(const BenchFile&) = delete;

  void write_all() {
    for (int64_t at = 0; at < bench_.io_bytes; at += bench_.block_bytes) {
      if (bench_.validate) block_->fill(at);  // not while a device is measured
      transfer(::pwrite(fd_, block_->data(), block_->size(), at));
    }
    if (::fsync(fd_) != 0) throw std::system_error(errno, std::generic_category(), path_);
  }

  void read_all() {
    for (int64_t at = 0; at < bench_.io_bytes; at += bench_.block_bytes) {
      transfer(::pread(fd_, block_->data(), block_->size(), at));
      if (bench_.validate && !block_->holds(at)) {
        throw std::runtime_error(path_ + ": what was read at " + std::to_string(at) + " is not what was written");
      }
    }
  }

  /// Where O_DIRECT is missing, the pages go at least before they are read.
  void drop_pages() const { ::posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED); }
  bool direct() const { return direct_; }

 private:
  void transfer(ssize_t done) const {
    if (done == static_cast<ssize_t>(bench_.block_bytes)) return;
    throw std::system_error(done < 0 ? errno : EIO, std::generic_category(), path_);
  }

  const IoBench& bench_;
  std::string path_;
  int fd_ = -1;
  bool direct_ = true;
  std::unique_ptr<Block> block_;
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
}

}  // namespace

IoResult run_io_bench(const IoBench& bench) {
  check(bench);
  Files files;
  for (int i = 0; i < bench.num_threads; ++i) files.push_back(std::make_unique<BenchFile>(bench, i));
  IoResult result;
  result.bytes = bench.io_bytes * bench.num_threads;
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
    throw UsageError("a size, got '" + text + "', expected a number of bytes such as 400M, 1G or 4096");
  }
  return value << shift;
}

}  // namespace deeptide::launch
