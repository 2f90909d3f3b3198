// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Blocks never overlap, freed ones come again whatever their size, and no more is kept than was promised.
#include "device/memory/page_heap.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace deeptide::device {
namespace {

constexpr int64_t kMega = 1 << 20;

int64_t mapped(const PageHeap& heap) {
  const auto stats = heap.stats();
  return stats.in_use_bytes + stats.idle_bytes;
}

/// Bytes of this process in memory.
int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * 4096;
}

TEST(PageHeap, GivesAlignedBlocksThatHoldWhatIsWritten) {
  PageHeap heap;
  std::vector<std::pair<char*, int64_t>> blocks;
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{4097}, 256 * int64_t{1024}, kMega, 2 * kMega - 1,
                              2 * kMega, 2 * kMega + 1, 100 * kMega}) {
    auto* block = static_cast<char*>(heap.allocate(bytes));
    ASSERT_NE(block, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % 4096, 0u);
    EXPECT_TRUE(heap.owns(block));
    std::memset(block, static_cast<int>(blocks.size()), bytes);
    blocks.emplace_back(block, bytes);
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto [block, bytes] = blocks[i];
    if (bytes == 0) continue;
    EXPECT_EQ(block[0], static_cast<char>(i));
    EXPECT_EQ(block[bytes - 1], static_cast<char>(i));
  }
  for (const auto& [block, bytes] : blocks) heap.free(block);
  EXPECT_EQ(heap.stats().in_use_bytes, 0);
}

TEST(PageHeap, WastesAtMostASixteenthAndAPageInABlock) {
  PageHeap heap;
  for (int64_t bytes = 256 << 10; bytes < 40 * kMega; bytes = bytes * 21 / 20 + 1) {
    const int64_t before = heap.stats().in_use_bytes;
    ASSERT_NE(heap.allocate(bytes), nullptr);
    EXPECT_LE(heap.stats().in_use_bytes - before, bytes + bytes / 16 + 4096 + 256) << bytes;
  }
}

TEST(PageHeap, KnowsOnlyItsOwnBlocksInUse) {
  PageHeap heap, other;
  void* block = heap.allocate(kMega);
  int stranger = 0;
  EXPECT_TRUE(heap.owns(block));
  EXPECT_FALSE(other.owns(block));
  EXPECT_FALSE(heap.owns(static_cast<char*>(block) + 4096));
  EXPECT_FALSE(heap.owns(&stranger));
  EXPECT_FALSE(heap.owns(nullptr));
  heap.free(block);
  EXPECT_FALSE(heap.owns(block));
}

TEST(PageHeap, GivesFreedMemoryAgainWithoutFaultsOrGrowth) {
  PageHeap heap;
  const auto step = [&] {
    std::vector<void*> blocks;
    for (int i = 0; i < 40; ++i) blocks.push_back(heap.allocate((i % 5 + 1) * 700 * 1024));
    for (void* block : blocks) heap.free(block);
  };
  step();
  const int64_t after_one = mapped(heap);
  for (int i = 0; i < 20; ++i) step();
  EXPECT_EQ(mapped(heap), after_one);
}

TEST(PageHeap, MakesOneLargeBlockOfFreedSmallOnes) {
  PageHeap heap;
  std::vector<void*> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(heap.allocate(512 << 10));
  for (const int i : {3, 1, 0, 2, 8, 10, 9, 15, 14, 13, 12, 11, 7, 4, 6, 5}) heap.free(blocks[i]);
  const int64_t before = mapped(heap);
  ASSERT_NE(heap.allocate(8 * kMega), nullptr);
  EXPECT_EQ(mapped(heap), before);
}

TEST(PageHeap, TakesTheSmallestRangeThatFits) {
  PageHeap heap;
  void* small = heap.allocate(kMega);
  void* fence = heap.allocate(kMega);
  void* large = heap.allocate(3 * kMega);
  void* end = heap.allocate(kMega);
  heap.free(large);
  heap.free(small);
  EXPECT_EQ(heap.allocate(kMega - 5000), small);
  EXPECT_EQ(heap.allocate(3 * kMega), large);
  heap.free(fence);
  heap.free(end);
}

TEST(PageHeap, KeepsAQuarterMoreThanWasInUseLately) {
  PageHeap heap(/*min_kept_bytes=*/0);
  std::vector<void*> blocks;
  for (int i = 0; i < 20; ++i) blocks.push_back(heap.allocate(10 * kMega));
  for (void* block : blocks) heap.free(block);
  EXPECT_EQ(heap.stats().peak_bytes, 200 * kMega);
  EXPECT_LE(mapped(heap), 250 * kMega);
  EXPECT_GE(mapped(heap), 200 * kMega) << "the next step will want it";
  for (int i = 0; i < 40'000; ++i) heap.free(heap.allocate(4 * kMega));
  EXPECT_LE(mapped(heap), 8 * kMega) << "long ago";
}

TEST(PageHeap, GivesBackWhatWasFreedLongestAgo) {
  PageHeap heap(/*min_kept_bytes=*/48 * kMega);
  std::array<void*, 4> blocks{};
  for (auto& block : blocks) {
    block = heap.allocate(16 * kMega);
    std::memset(block, 1, 16 * kMega);
    heap.allocate(256 << 10);  // so that neighbours do not grow together
  }
  const int64_t before = resident_bytes();
  for (auto* block : blocks) heap.free(block);
  EXPECT_LE(mapped(heap), 65 * kMega * 5 / 4);
  heap.release_idle();
  EXPECT_LE(mapped(heap), 4 * kMega) << "only the four small blocks";
  EXPECT_LT(resident_bytes(), before - 48 * kMega);
}

/// Blocks of many sizes leave fragments that no large page fits into. What they hold counts, and goes back.
TEST(PageHeap, KeepsItsPromiseWhenMemoryIsInFragments) {
  PageHeap heap(/*min_kept_bytes=*/0);
  const int64_t before = resident_bytes();
  std::vector<void*> kept, freed;
  for (int i = 0; i < 200; ++i) {
    for (auto* blocks : {&kept, &freed}) {
      blocks->push_back(heap.allocate(kMega));
      std::memset(blocks->back(), 1, kMega);
    }
  }
  for (void* block : freed) heap.free(block);
  for (int i = 0; i < 40'000; ++i) heap.free(heap.allocate(kMega / 2));  // the peak is long ago
  EXPECT_LE(mapped(heap), 200 * kMega * 5 / 4 + 2 * kMega);
  EXPECT_LE(resident_bytes() - before, 200 * kMega * 5 / 4 + 16 * kMega);
  for (void*& block : freed) {  // and their addresses serve again
    block = heap.allocate(kMega);
    std::memset(block, 2, kMega);
  }
  EXPECT_LE(mapped(heap), 404 * kMega);
  for (void* block : kept) EXPECT_EQ(static_cast<char*>(block)[kMega - 1], 1);
  for (auto* blocks : {&kept, &freed}) {
    for (void* block : *blocks) heap.free(block);
  }
  heap.release_idle();
  EXPECT_EQ(mapped(heap), 0);
}

TEST(PageHeap, ReturnsNullWhenThereIsNoMemoryAndGoesOn) {
  PageHeap heap;
  heap.free(heap.allocate(20 * kMega));
  EXPECT_EQ(heap.allocate(int64_t{1} << 50), nullptr);
  EXPECT_EQ(mapped(heap), 0) << "what was idle went first";
  void* block = heap.allocate(kMega);
  ASSERT_NE(block, nullptr);
  heap.free(block);
}

/// Random sizes and lifetimes: each block is filled with its own pattern and must still hold it when it goes.
TEST(PageHeap, KeepsBlocksApartInALongRandomLife) {
  PageHeap heap(/*min_kept_bytes=*/8 * kMega);
  std::mt19937_64 random(1);
  struct Block {
    uint64_t* data;
    int64_t words;
    uint64_t mark;
  };
  std::vector<Block> blocks;
  const auto check_and_free = [&](const Block& block) {
    for (int64_t i = 0; i < block.words; i += 512) ASSERT_EQ(block.data[i], block.mark);
    ASSERT_EQ(block.data[block.words - 1], block.mark);
    heap.free(block.data);
  };
  for (int i = 0; i < 20'000; ++i) {
    if (blocks.size() < 24 && random() % 2 == 0) {
      const int64_t words = static_cast<int64_t>(random() % (kMega / 2)) + 1;
      Block block{static_cast<uint64_t*>(heap.allocate(words * 8)), words, random()};
      ASSERT_NE(block.data, nullptr);
      for (int64_t k = 0; k < words; k += 512) block.data[k] = block.mark;
      block.data[words - 1] = block.mark;
      blocks.push_back(block);
    } else if (!blocks.empty()) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      check_and_free(blocks.back());
      blocks.pop_back();
    }
    if (i % 1000 == 0) heap.release_idle();
  }
  for (const Block& block : blocks) check_and_free(block);
  EXPECT_EQ(heap.stats().in_use_bytes, 0);
  heap.release_idle();
  EXPECT_EQ(mapped(heap), 0) << "everything grew together again";
}

TEST(PageHeap, ServesThreadsThatFreeEachOthersBlocks) {
  PageHeap heap;
  std::array<std::atomic<void*>, 8> slots{};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 2000; ++i) {
        auto* block = static_cast<unsigned char*>(heap.allocate(300 * 1024 + random() % kMega));
        block[0] = static_cast<unsigned char>(t);
        block[300 * 1024 - 1] = static_cast<unsigned char>(t);
        auto* other = static_cast<unsigned char*>(slots[random() % slots.size()].exchange(block));
        if (other == nullptr) continue;
        EXPECT_EQ(other[0], other[300 * 1024 - 1]) << "lent twice";
        heap.free(other);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& slot : slots) {
    if (void* block = slot.load()) heap.free(block);
  }
  EXPECT_EQ(heap.stats().in_use_bytes, 0);
}

TEST(PageHeap, RefusesWhatNoMachineHas) {
  PageHeap heap;
  for (const int64_t bytes : {INT64_MAX, INT64_MAX - 4095, (int64_t{1} << 56) + 1}) {
    EXPECT_EQ(heap.allocate(bytes), nullptr) << bytes;
  }
  EXPECT_EQ(mapped(heap), 0);
}

/// The flags of the mapping in which an address lies, as /proc/self/smaps says.
std::string flags_at(const void* address) {
  std::ifstream file("/proc/self/smaps");
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) inside = begin <= wanted && wanted < end;
    if (inside && line.rfind("VmFlags:", 0) == 0) return line;
  }
  return "";
}

TEST(PageHeap, WantsNoLargePagesWhereItGavePagesBack) {
  PageHeap heap;
  void* const first = heap.allocate(kMega / 4);
  void* const second = heap.allocate(kMega / 4);
  void* const last = heap.allocate(kMega / 4);
  const std::string plain = flags_at(second);
  if (plain.find(" hg") == std::string::npos) GTEST_SKIP() << "a kernel without large pages on request";
  heap.free(second);
  heap.release_idle();
  EXPECT_NE(flags_at(second).find(" nh"), std::string::npos) << flags_at(second);
  EXPECT_EQ(heap.allocate(kMega / 4), second);
  EXPECT_NE(flags_at(second).find(" hg"), std::string::npos) << flags_at(second);
  for (void* block : {first, second, last}) heap.free(block);
}

}  // namespace
}  // namespace deeptide::device
