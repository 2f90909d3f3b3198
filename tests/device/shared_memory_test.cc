// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Memory that processes share without a name, and private views of it: what is written where, and that nothing is left.
#include "device/memory/shared_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace deeptide::device {
namespace {

using Ranges = std::vector<std::pair<int64_t, int64_t>>;

int64_t page() { return page_size(); }

/// Runs `child` in a forked process; its exit status, 0 when it returned true.
template <typename Child>
int run_forked(const Child& child) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(child() ? 0 : 1);
  int status = 0;
  ::waitpid(pid, &status, 0);
  return status;
}

Ranges written(const PrivateView& view, bool by_entries) {
  Ranges ranges;
  view.any_written(
      [&](int64_t begin, int64_t end) {
        if (!ranges.empty() && ranges.back().second == begin) {
          ranges.back().second = end;
        } else {
          ranges.emplace_back(begin, end);
        }
        return false;
      },
      by_entries);
  return ranges;
}

char* bytes_of(const std::shared_ptr<PrivateView>& view, int64_t count) {
  return static_cast<char*>(view->tensor(0, count, at::kByte).mutable_data_ptr());
}

int64_t count_lines(const char* path, const std::string& word) {
  std::ifstream file(path);
  int64_t count = 0;
  for (std::string line; std::getline(file, line);) count += line.find(word) != std::string::npos;
  return count;
}

int64_t open_files() {
  int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

int64_t mappings() { return count_lines("/proc/self/maps", "memfd:deeptide"); }

/// The pages that the memory really has, in bytes.
int64_t taken_bytes(const SharedMemory& memory) {
  struct stat status {};
  EXPECT_EQ(::fstat(memory.descriptor(), &status), 0);
  return status.st_blocks * 512;
}

TEST(SharedMemory, IsZeroedAndSeenByAProcessThatOpensItsAddress) {
  const auto memory = SharedMemory::create(3 * page() + 5);
  EXPECT_EQ(memory->size(), 3 * page() + 5);
  for (int64_t at = 0; at < memory->size(); ++at) ASSERT_EQ(memory->data()[at], 0);
  memory->data()[7] = 'a';
  // A process of its own, that shares nothing but the address.
  const std::string path = memory->address();
  const std::string command = "printf b | dd of=" + path + " bs=1 seek=8 conv=notrunc 2>/dev/null && head -c 8 " +
                              path + " | tail -c 1 | grep -q a";
  EXPECT_EQ(std::system(command.c_str()), 0);
  EXPECT_EQ(memory->data()[8], 'b');
}

TEST(SharedMemory, OpenedByAForkedChildIsAnotherMappingOfTheSamePages) {
  const auto memory = SharedMemory::create(page());
  const std::string address = memory->address();
  EXPECT_EQ(run_forked([&] {
              const auto opened = SharedMemory::open(address);
              if (opened->data() == memory->data() || opened->size() != memory->size()) return false;
              opened->data()[1] = 'x';
              return memory->data()[1] == 'x';
            }),
            0);
  EXPECT_EQ(memory->data()[1], 'x');
}

TEST(SharedMemory, IsMappedOnceInTheProcessThatCreatedIt) {
  const auto before = mappings();
  const auto memory = SharedMemory::create(page());
  EXPECT_EQ(SharedMemory::open(memory->address()), memory);
  EXPECT_EQ(mappings(), before + 1);
}

TEST(SharedMemory, SaysWhichAddressCannotBeOpened) {
  std::string address;
  { address = SharedMemory::create(page())->address(); }
  try {
    SharedMemory::open(address);
    FAIL() << "opened what is gone";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("cannot open the shared memory of another rank at " + address),
              std::string::npos)
        << error.what();
  }
}

TEST(SharedMemory, RefusesASizeThatTheKernelRefuses) { EXPECT_ANY_THROW(SharedMemory::create(-1)); }

TEST(SharedMemory, TakesPagesWhenTouchedOrPopulatedAndGivesThemBack) {
  const auto memory = SharedMemory::create(64 * page());
  EXPECT_EQ(taken_bytes(*memory), 0) << "a generous size costs nothing";
  memory->data()[3 * page()] = 1;
  EXPECT_EQ(taken_bytes(*memory), page());
  memory->populate(10 * page() + 1, 2 * page());  // touches three pages
  EXPECT_EQ(taken_bytes(*memory), 4 * page());
  memory->data()[11 * page()] = 1;
  memory->populate(3 * page(), page());
  EXPECT_EQ(memory->data()[3 * page()], 1) << "populating changes nothing";
  memory->discard(10 * page(), 3 * page());
  EXPECT_EQ(taken_bytes(*memory), page());
  EXPECT_EQ(memory->data()[11 * page()], 0);
  memory->populate(0, 0);
  memory->populate(63 * page(), 5 * page());  // ends with the memory
  EXPECT_EQ(taken_bytes(*memory), 3 * page()) << "with the one that was read just now";
}

TEST(SharedMemory, KeepsItsPagesWhenAForkedChildLetsGoOfThem) {
  const auto memory = SharedMemory::create(page());
  memory->data()[0] = 1;
  EXPECT_EQ(run_forked([&] {
              memory->discard(0, page());
              return true;
            }),
            0);
  EXPECT_EQ(memory->data()[0], 1);
}

TEST(SharedMemory, LivesAsLongAsAViewAndSaysWhenItGoes) {
  int released = 0;
  const auto before = mappings();
  at::Tensor view;
  {
    const auto memory = SharedMemory::create(page());
    view = memory->view(64, 4, at::kFloat, [&] { ++released; });
  }
  EXPECT_EQ(view.numel(), 4);
  view.mutable_data_ptr<float>()[3] = 2.0f;
  EXPECT_EQ(mappings(), before + 1);
  const at::Tensor part = view.narrow(0, 1, 2);
  view = at::Tensor();
  EXPECT_EQ(released, 0);
  EXPECT_EQ(part.numel(), 2);
}

TEST(SharedMemory, CallsBackOnceWhenTheLastReferenceGoes) {
  int released = 0;
  const auto memory = SharedMemory::create(page());
  {
    at::Tensor view = memory->view(0, 4, at::kFloat, [&] { ++released; });
    const at::Tensor other = view.narrow(0, 0, 1);
    view = at::Tensor();
    EXPECT_EQ(released, 0);
  }
  EXPECT_EQ(released, 1);
  EXPECT_ANY_THROW(memory->view(page() - 4, 2, at::kFloat)) << "beyond its end";
}

class Views : public testing::TestWithParam<bool> {
 protected:
  static constexpr int64_t kPages = 700;  // more regions than one call of the kernel returns
  std::shared_ptr<SharedMemory> memory_ = SharedMemory::create((kPages + 2) * page());
  std::shared_ptr<PrivateView> view_ = std::make_shared<PrivateView>(memory_, page(), kPages* page());
  char* seen_ = bytes_of(view_, kPages* page());
  char* shared_ = memory_->data() + page();
  bool by_entries_ = GetParam();
};

TEST_P(Views, ReadThroughUntilAPageIsWrittenAndAgainWhenForgotten) {
  shared_[5] = 1;
  EXPECT_EQ(seen_[5], 1);
  shared_[5] = 2;
  EXPECT_EQ(seen_[5], 2) << "also after it was read";
  EXPECT_TRUE(written(*view_, by_entries_).empty()) << "reading writes nothing";
  seen_[6] = 9;
  EXPECT_EQ(shared_[6], 0) << "its own";
  shared_[5] = 3;
  EXPECT_EQ(seen_[5], 2) << "the page is a copy now";
  shared_[page()] = 4;
  EXPECT_EQ(seen_[page()], 4) << "the next one is not";
  view_->forget();
  EXPECT_EQ(seen_[5], 3);
  EXPECT_EQ(seen_[6], 0);
  EXPECT_TRUE(written(*view_, by_entries_).empty());
}

TEST_P(Views, TellExactlyWhichPagesWereWritten) {
  std::mt19937 random(3);
  for (const int every : {1, 2, 3, 50, 699}) {
    std::set<int64_t> expected;
    for (int64_t p = 0; p < kPages; p += every) expected.insert(p);
    for (const int64_t p : expected) seen_[p * page() + static_cast<int64_t>(random() % page())] = 1;
    for (int64_t p = 0; p < kPages; p += 7) shared_[p * page()] = 1;  // others' writes are not its own
    volatile char sum = 0;
    for (int64_t p = 0; p < kPages; ++p) sum = sum + seen_[p * page() + 1];
    std::set<int64_t> found;
    for (const auto& [begin, end] : written(*view_, by_entries_)) {
      ASSERT_EQ(begin % page(), 0);
      for (int64_t at = begin; at < end; at += page()) found.insert(at / page());
    }
    EXPECT_EQ(found, expected) << "every " << every;
    view_->forget();
  }
}

TEST_P(Views, StopWhenAsked) {
  seen_[0] = seen_[2 * page()] = 1;
  int calls = 0;
  EXPECT_TRUE(view_->any_written([&](int64_t, int64_t) { return ++calls == 1; }, by_entries_));
  EXPECT_EQ(calls, 1);
  EXPECT_FALSE(view_->any_written([](int64_t, int64_t) { return false; }, by_entries_));
}

TEST_P(Views, EndWhereTheyEnd) {
  const auto odd = std::make_shared<PrivateView>(memory_, 0, page() + 10);
  char* data = bytes_of(odd, page() + 10);
  data[page() + 9] = 1;
  EXPECT_EQ(written(*odd, by_entries_), (Ranges{{page(), page() + 10}}));
}

TEST_P(Views, OfTwoProgramsAreApart) {
  const auto other = std::make_shared<PrivateView>(memory_, page(), kPages * page());
  seen_[0] = 1;
  EXPECT_TRUE(written(*other, by_entries_).empty());
  EXPECT_EQ(bytes_of(other, 1)[0], 0);
}

TEST_P(Views, AreNotReachedByAForkedChildsWrites) {
  seen_[0] = 1;
  EXPECT_EQ(run_forked([&] {
              if (written(*view_, by_entries_) != Ranges{{0, page()}}) return false;  // the child's own table of pages
              seen_[0] = 2;
              seen_[3 * page()] = 2;
              const auto mine = written(*view_, by_entries_);
              return seen_[3 * page()] == 2 && mine == Ranges{{0, page()}, {3 * page(), 4 * page()}};
            }),
            0);
  EXPECT_EQ(seen_[0], 1);
  EXPECT_EQ(seen_[3 * page()], 0);
  EXPECT_EQ(shared_[3 * page()], 0);
  EXPECT_EQ(written(*view_, by_entries_), (Ranges{{0, page()}}));
}

TEST_P(Views, TellOfPagesThatWereSwappedOutOrReclaimed) {
  seen_[0] = 1;
  shared_[page()] = 1;
  volatile char read = seen_[page()];
  EXPECT_EQ(read, 1);
#ifdef MADV_PAGEOUT
  ::madvise(seen_, 2 * page(), MADV_PAGEOUT);
#endif
  EXPECT_EQ(written(*view_, by_entries_), (Ranges{{0, page()}}));
  EXPECT_EQ(seen_[0], 1);
}

INSTANTIATE_TEST_SUITE_P(BothWays, Views, testing::Bool(),
                         [](const auto& info) { return info.param ? "entries" : "scan"; });

TEST(PrivateView, MayBeOfNothing) {
  const auto memory = SharedMemory::create(page());
  const auto view = std::make_shared<PrivateView>(memory, 0, 0);
  EXPECT_EQ(view->tensor(0, 0, at::kFloat).numel(), 0);
  EXPECT_TRUE(written(*view, false).empty());
  view->forget();
}

TEST(PrivateView, SaysWhenLockedMemoryCannotBeForgotten) {
  const auto memory = SharedMemory::create(page());
  const auto view = std::make_shared<PrivateView>(memory, 0, page());
  char* seen = bytes_of(view, page());
  seen[0] = 1;
  // The call itself: sanitizers make the function do nothing.
  if (::syscall(SYS_mlock, seen, page()) != 0) GTEST_SKIP() << "no memory may be locked here";
  EXPECT_ANY_THROW(view->forget());
  ::syscall(SYS_munlock, seen, page());
  view->forget();
  EXPECT_EQ(seen[0], 0);
}

TEST(PrivateView, LivesAsLongAsItsTensors) {
  const auto before = mappings();
  {
    at::Tensor tensor;
    {
      const auto memory = SharedMemory::create(page());
      memory->data()[4] = 5;
      tensor = std::make_shared<PrivateView>(memory, 0, page())->tensor(4, 1, at::kByte);
    }
    EXPECT_EQ(tensor.const_data_ptr<uint8_t>()[0], 5);
    EXPECT_EQ(mappings(), before + 2);
  }
  EXPECT_EQ(mappings(), before);
}

TEST(PrivateView, PassesItsOwnCheckAndLeavesTheMemoryAsItWas) {
  const auto memory = SharedMemory::create(2 * page());
  PrivateView::check(memory);
  EXPECT_EQ(memory->data()[0], 0);
  memory->data()[0] = 1;
  EXPECT_ANY_THROW(PrivateView::check(memory)) << "takes zeroed memory";
}

TEST(SharedMemory, LeavesNothingOverManyCycles) {
  PrivateView::check(SharedMemory::create(page()));  // /proc/self/pagemap is opened once
  const auto files = open_files(), maps = count_lines("/proc/self/maps", "");
  for (int cycle = 0; cycle < 50; ++cycle) {
    const auto memory = SharedMemory::create(8 << 20);
    memory->populate(0, 1 << 20);
    const auto view = std::make_shared<PrivateView>(memory, 2 << 20, 1 << 20);
    bytes_of(view, 1)[0] = 1;
    const auto again = SharedMemory::open(memory->address());
    if (cycle % 10 == 0) {
      EXPECT_EQ(run_forked([&] { return !written(*view, false).empty(); }), 0);
    }
  }
  EXPECT_EQ(open_files(), files);
  EXPECT_EQ(mappings(), 0);
  EXPECT_NEAR(count_lines("/proc/self/maps", ""), maps, 3);  // malloc's own come and go
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    EXPECT_EQ(entry.path().string().find("deeptide"), std::string::npos) << entry.path();
  }
}

}  // namespace
}  // namespace deeptide::device
