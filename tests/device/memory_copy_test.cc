// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A copy past the cache is a copy: of any length, from and to anywhere.
#include "device/memory/memory_copy.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

namespace deeptide::device {
namespace {

TEST(CopyPastCache, CopiesTheseBytesAndNoOthers) {
  constexpr size_t kBytes = 600, kFence = 64;
  std::vector<uint8_t> source(kBytes + kFence);
  std::iota(source.begin(), source.end(), uint8_t{1});
  for (size_t from = 0; from < 20; from += 19) {
    for (size_t to = 0; to < kFence; ++to) {
      for (const size_t bytes : {0, 1, 15, 63, 64, 65, 127, 200, 512}) {
        std::vector<uint8_t> copy(to + bytes + kFence, 0), expected = copy;
        copy_past_cache(copy.data() + to, source.data() + from, bytes);
        std::copy_n(source.data() + from, bytes, expected.data() + to);
        ASSERT_EQ(copy, expected) << bytes << " bytes from " << from << " to " << to;
      }
    }
  }
}

/// Pages that each thread of this process has touched first.
std::map<std::string, int64_t> faults_by_thread() {
  std::map<std::string, int64_t> faults;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "stat");
    std::string text((std::istreambuf_iterator<char>(file)), {});
    std::istringstream fields(text.substr(text.rfind(')') + 1));
    std::string field;
    for (int i = 3; i <= 9; ++i) fields >> field;  // after the name in parentheses; proc(5) calls it minflt, no. 10
    fields >> faults[task.path().filename()];
  }
  return faults;
}

TEST(CopyInParallel, CopiesABucketOnSeveralThreads) {
  constexpr size_t kBytes = 32 << 20;
  const int64_t share = static_cast<int64_t>(kBytes) / 4096 / 8;
  const int threads = at::get_num_threads();
  at::set_num_threads(4);
  const std::vector<uint8_t> source(kBytes, 7);
  void* fresh = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(fresh, MAP_FAILED);
  ::madvise(fresh, kBytes, MADV_NOHUGEPAGE);       // so that each thread's part is counted page by page
  copy_in_parallel(fresh, source.data(), kBytes);  // makes the threads
  ::madvise(fresh, kBytes, MADV_DONTNEED);
  auto before = faults_by_thread();
  copy_in_parallel(fresh, source.data(), kBytes);
  int busy = 0;
  for (const auto& [thread, faults] : faults_by_thread()) busy += faults - before[thread] >= share ? 1 : 0;
  EXPECT_GE(busy, 2);
  EXPECT_EQ(std::memcmp(fresh, source.data(), kBytes), 0);
  ::munmap(fresh, kBytes);
  at::set_num_threads(threads);
}

}  // namespace
}  // namespace deeptide::device
