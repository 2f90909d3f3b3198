// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads what control groups allow from folders as the kernel shows them.
#include "device/memory/memory_limit.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace deeptide::device {
namespace {

/// A tree of control groups in a folder of its own.
class Groups {
 public:
  Groups() {
    char folder[] = "/tmp/deeptide_groups.XXXXXX";
    root_ = ::mkdtemp(folder);
  }
  ~Groups() { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  std::optional<MemoryLimit> limit(const std::string& groups, int64_t free_swap = 0) const {
    return tightest_memory_limit(groups, root_, free_swap);
  }
  const std::string& root() const { return root_; }

 private:
  std::string root_;
};

TEST(MemoryLimit, IsTheTightestOfAGroupAndItsAncestors) {
  Groups groups;
  groups.write("/memory.max", "max\n");
  groups.write("/job/memory.max", "1000\n");
  groups.write("/job/memory.current", "900\n");
  groups.write("/job/task/memory.max", "5000\n");
  groups.write("/job/task/memory.current", "300\n");
  const auto limit = groups.limit("0::/job/task\n");
  ASSERT_TRUE(limit);
  EXPECT_EQ(limit->group, groups.root() + "/job");
  EXPECT_EQ(limit->limit, 1000);
  EXPECT_EQ(limit->left, 100);
}

TEST(MemoryLimit, CountsCachesAsFree) {
  Groups groups;
  groups.write("/job/memory.max", "1000\n");
  groups.write("/job/memory.current", "900\n");
  groups.write("/job/memory.stat", "anon 500\ninactive_file 200\nactive_file 30\nslab_reclaimable 7\nshmem 90\n");
  EXPECT_EQ(groups.limit("0::/job\n")->left, 337);
}

TEST(MemoryLimit, CountsTheSwapThatTheGroupMayUse) {
  Groups groups;
  groups.write("/job/memory.max", "1000\n");
  groups.write("/job/memory.current", "900\n");
  EXPECT_EQ(groups.limit("0::/job\n", 50)->left, 150) << "no limit on swap";
  groups.write("/job/memory.swap.max", "max\n");
  EXPECT_EQ(groups.limit("0::/job\n", 50)->left, 150);
  groups.write("/job/memory.swap.max", "40\n");
  groups.write("/job/memory.swap.current", "15\n");
  EXPECT_EQ(groups.limit("0::/job\n", 50)->left, 125);
}

TEST(MemoryLimit, IsFoundAtTheRootThatAContainerSees) {
  Groups groups;
  groups.write("/memory.max", "1000\n");
  groups.write("/memory.current", "400\n");
  for (const char* own : {"0::/\n", "0::/docker/0123\n", "0::/../outside\n"}) {
    ASSERT_TRUE(groups.limit(own)) << own;
    EXPECT_EQ(groups.limit(own)->left, 600) << own;
  }
}

TEST(MemoryLimit, IsReadInVersionOneToo) {
  Groups groups;
  groups.write("/memory/job/memory.limit_in_bytes", "1000\n");
  groups.write("/memory/job/memory.usage_in_bytes", "900\n");
  groups.write("/memory/job/memory.stat", "cache 300\ntotal_inactive_file 25\ntotal_active_file 5\n");
  groups.write("/memory/memory.limit_in_bytes", "9223372036854771712\n");
  groups.write("/memory/memory.usage_in_bytes", "900\n");
  EXPECT_EQ(groups.limit("9:name=systemd:/\n4:cpu,memory:/job\n0::/\n")->left, 130);
}

TEST(MemoryLimit, IsNothingWithoutOneOrWithoutGroups) {
  Groups groups;
  EXPECT_FALSE(groups.limit(""));
  EXPECT_FALSE(groups.limit("0::/job\n"));
  groups.write("/job/memory.max", "max\n");
  groups.write("/job/memory.current", "900\n");
  EXPECT_FALSE(groups.limit("0::/job\n"));
  EXPECT_FALSE(groups.limit("nonsense"));
}

}  // namespace
}  // namespace deeptide::device
