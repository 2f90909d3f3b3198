// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Buffers in files: what was written is read, whatever the order, the number of slots and the queue; faults are named.
#include "tiers/file_store.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>

#include "checkpoint/scratch.h"
#include "denied.h"

namespace deeptide::tiers {
namespace {

using at::Tensor;

constexpr int64_t kSwapBlockNumel = kSwapBlockBytes / 4;  // fp32
constexpr int64_t kNumel = 5 * kSwapBlockNumel + 1234;

/// Performs every transfer but those that `fails` chooses.
class FaultyQueue : public io::Queue {
 public:
  using Fails = std::function<int(const io::Transfer&)>;
  explicit FaultyQueue(Fails fails) : queue_(io::make_thread_queue(2)), fails_(std::move(fails)) {}
  Ticket start(const io::Transfer& transfer) override {
    const int error = fails_(transfer);
    const Ticket ticket = queue_->start(transfer);
    if (error != 0) faults_[ticket] = error;
    return ticket;
  }
  int wait(Ticket ticket) override {
    const int error = queue_->wait(ticket);
    return faults_.contains(ticket) ? faults_[ticket] : error;
  }
  bool is_done(Ticket ticket) override { return queue_->is_done(ticket); }
  const char* name() const override { return "faulty"; }

 private:
  std::unique_ptr<io::Queue> queue_;
  Fails fails_;
  std::map<Ticket, int> faults_;
};

struct Disk {
  explicit Disk(std::unique_ptr<io::Queue> queue, int slots = 4, int folders = 1) {
    std::vector<std::string> paths;
    for (int i = 0; i < folders; ++i) paths.push_back(folder.path() + "/" + std::to_string(i));
    file = std::make_shared<SwapFile>(paths);
    staging = std::make_shared<Staging>(std::move(queue), slots, ledger, device::Role::optimizer);
  }
  Buffer make(int64_t numel, int64_t resident_blocks = 0) {
    return file_buffer(at::zeros({resident_blocks * kSwapBlockNumel}), numel, file, staging, "moments");
  }

  /// A path to the file, which has no name: this process's own descriptor.
  std::string open_file() const {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code closed;
      if (std::filesystem::read_symlink(entry, closed).string().starts_with(folder.path())) return entry.path();
    }
    return "";
  }

  checkpoint::Scratch folder;
  std::shared_ptr<device::Ledger> ledger = std::make_shared<device::Ledger>();
  std::shared_ptr<SwapFile> file;
  std::shared_ptr<Staging> staging;
};

void write(const Buffer& buffer, const Tensor& values) {
  for_each_block(buffer, {0, buffer.numel()}, [&](Block block) {
    buffer.prefetch({block.begin, 1});
    buffer.lease(block, Access::write).tensor().copy_(values.narrow(0, block.begin, block.count));
  });
}

using Setting = std::tuple<const char*, int, int, int>;  // queue, slots, folders, resident blocks

class Files : public testing::TestWithParam<Setting> {
 protected:
  Disk disk() const {
    const auto& [queue, slots, folders, resident] = GetParam();
    return Disk(std::string(queue) == "threads" ? io::make_thread_queue(slots) : io::make_queue(slots), slots, folders);
  }
  int resident() const { return std::get<3>(GetParam()); }
};

TEST_P(Files, BeginAsZerosAndKeepWhatWasWritten) {
  Disk disk = this->disk();
  const Buffer one = disk.make(kNumel, resident()), other = disk.make(kNumel - kSwapBlockNumel);
  EXPECT_TRUE(at::equal(one.copy(), at::zeros({kNumel})));
  const Tensor values = at::arange(kNumel).to(at::kFloat);
  write(one, values);
  write(other, values.narrow(0, 0, other.numel()).neg());
  EXPECT_TRUE(at::equal(one.copy(), values));
  EXPECT_TRUE(at::equal(other.copy(), values.narrow(0, 0, other.numel()).neg()));
}

TEST_P(Files, FollowRandomUpdatesOfParts) {
  Disk disk = this->disk();
  const Buffer buffer = disk.make(kNumel, resident());
  Tensor expected = at::zeros({kNumel});
  std::mt19937 random(7);
  for (int i = 0; i < 60; ++i) {
    const Block block = buffer.block(static_cast<int64_t>(random() % static_cast<unsigned>(buffer.num_blocks())));
    const int64_t begin = block.begin + static_cast<int64_t>(random() % static_cast<unsigned>(block.count));
    const int64_t count = std::min<int64_t>(1 + random() % 5000, block.begin + block.count - begin);
    const auto access = i % 3 == 0 ? Access::write : Access::update;
    if (i % 2 == 0) buffer.prefetch({begin, 1});
    const auto lease = buffer.lease({begin, count}, access);
    if (access == Access::write) {
      lease.tensor().fill_(i);
      expected.narrow(0, begin, count).fill_(i);
    } else {
      lease.tensor().add_(i);
      expected.narrow(0, begin, count).add_(i);
    }
  }
  EXPECT_TRUE(at::equal(buffer.copy(), expected));
}

INSTANTIATE_TEST_SUITE_P(Grid, Files,
                         testing::Values(Setting{"threads", 4, 1, 0}, Setting{"threads", 1, 2, 1},
                                         Setting{"best", 4, 1, 0}, Setting{"best", 2, 3, 2}, Setting{"best", 8, 1, 5}));

TEST(SwapFile, LeavesNoNameAndReservesItsBytes) {
  Disk disk(io::make_queue(2), 2, 2);
  const Buffer buffer = disk.make(kNumel);
  EXPECT_GE(disk.file->reserved_bytes(), kNumel * 4);
  EXPECT_LE(disk.file->reserved_bytes(), kNumel * 4 + io::kAlignment);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(disk.folder.path())) {
    EXPECT_TRUE(entry.is_directory()) << entry.path();
  }
}

/// Runs `work` in a child to which the kernel refuses these calls: 0 if it ends well, 2 where nothing can be refused.
int where_refused(std::initializer_list<Denied> calls, const std::function<void()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (!deny(calls)) ::_exit(2);
    try {
      work();
    } catch (const std::exception& failure) {
      std::fputs(failure.what(), stderr);
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// The refusal of ext2 and of some network file systems.
int without_fallocate(int error, const std::function<void()>& work) {
  return where_refused({{SYS_fallocate, error}}, work);
}

TEST(ThreadQueue, WorksByItsCallerWhereTheSystemHasNoThread) {
  const int code = where_refused({{SYS_clone3, EAGAIN}, {SYS_clone, EAGAIN}}, [] {
    at::set_num_threads(1);
    Disk disk(io::make_thread_queue(2), 2);
    const Buffer buffer = disk.make(kNumel);
    const Tensor values = at::arange(kNumel).to(at::kFloat);
    write(buffer, values);
    TORCH_CHECK(at::equal(buffer.copy(), values));
  });
  if (code == 2) GTEST_SKIP() << "this kernel filters no system calls";
  EXPECT_EQ(code, 0);
}

TEST(SwapFile, ReservesByWritingWhereAFileSystemCannotOtherwise) {
  for (const int error : {EOPNOTSUPP, ENOSYS}) {
    const int code = without_fallocate(error, [] {
      at::set_num_threads(1);
      Disk disk(io::make_thread_queue(2), 2);
      const Buffer buffer = disk.make(kNumel);
      struct stat status {};
      TORCH_CHECK(::stat(disk.open_file().c_str(), &status) == 0 && status.st_blocks * 512 >= kNumel * 4,
                  "space was promised, not taken: ", status.st_blocks * 512);
      TORCH_CHECK(at::equal(buffer.copy(), at::zeros({kNumel})));
      const Tensor values = at::arange(kNumel).to(at::kFloat);
      write(buffer, values);
      TORCH_CHECK(at::equal(buffer.copy(), values));
    });
    if (code == 2) GTEST_SKIP() << "this kernel filters no system calls";
    EXPECT_EQ(code, 0);
  }
}

TEST(SwapFile, SaysWhatTheKernelSaysToAnyOtherRefusal) {
  const int code = without_fallocate(ENOSPC, [] {
    Disk disk(io::make_thread_queue(2), 2);
    try {
      disk.make(kNumel);
    } catch (const std::runtime_error& error) {
      TORCH_CHECK(std::string(error.what()).find("No space left on device") != std::string::npos, error.what());
      return;
    }
    TORCH_CHECK(false, "nothing was refused");
  });
  if (code == 2) GTEST_SKIP() << "this kernel filters no system calls";
  EXPECT_EQ(code, 0);
}

TEST(Staging, NamesAReadThatFailed) {
  Disk disk(std::make_unique<FaultyQueue>([](const io::Transfer& t) { return t.read && t.at > 0 ? EIO : 0; }), 2);
  const Buffer buffer = disk.make(kNumel);
  EXPECT_NO_THROW(buffer.lease(buffer.block(0), Access::read));
  try {
    buffer.lease(buffer.block(1), Access::read);
    FAIL() << "lent a block that could not be read";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("reading a block of moments in '" + disk.folder.path()), std::string::npos)
        << error.what();
    EXPECT_NE(std::string(error.what()).find("Input/output error"), std::string::npos) << error.what();
  }
}

TEST(Staging, NamesAWriteThatFailedAndKeepsTheBlock) {
  bool broken = true;
  Disk disk(std::make_unique<FaultyQueue>([&](const io::Transfer& t) { return broken && !t.read ? ENOSPC : 0; }), 1);
  const Buffer buffer = disk.make(kNumel);
  buffer.lease(buffer.block(0), Access::write).tensor().fill_(1.0f);
  const auto use_next = [&] { buffer.lease(buffer.block(1), Access::read); };
  EXPECT_THROW(use_next(), std::runtime_error);
  broken = false;
  EXPECT_NO_THROW(use_next());
  EXPECT_EQ(buffer.lease(buffer.block(0), Access::read).tensor()[5].item<float>(), 1.0f);
}

TEST(Staging, NeverTakesTheHolesOfATruncatedFileForValues) {
  Disk disk(io::make_queue(2), 2);
  const Buffer buffer = disk.make(kNumel);
  write(buffer, at::arange(kNumel).to(at::kFloat));
  ASSERT_EQ(::truncate(disk.open_file().c_str(), kSwapBlockBytes), 0);
  const auto text_of = [&](int64_t block, Access access) {
    std::string text;
    try {
      for (const int64_t other : {block, int64_t{0}}) buffer.lease(buffer.block(other), access).tensor().fill_(7.0f);
    } catch (const std::runtime_error& error) {
      text = error.what();
    }
    return text;
  };
  for (const int64_t block : {1, 2, 3}) {
    EXPECT_NE(text_of(block, Access::update).find("failed: the file has been truncated"), std::string::npos);
  }
}

TEST(Staging, ForgetsTheBlocksOfABufferThatIsGone) {
  Disk disk(io::make_queue(4), 4);
  for (int i = 0; i < 8; ++i) {  // the next buffer may lie where the last one lay
    const Buffer buffer = disk.make(kSwapBlockNumel);
    EXPECT_EQ(buffer.copy().abs().max().item<float>(), 0.0f);
    buffer.lease(buffer.block(0), Access::write).tensor().fill_(3.0f);
  }
}

int g_refusals = 0;  // that the kernel is to give

int refuse() {
  if (g_refusals == 0) return 0;
  return g_refusals-- % 2 == 0 ? EAGAIN : EBUSY;
}

/// The caller closes it.
int unnamed_file(const std::string& name) {
  const std::string path = ::testing::TempDir() + "/" + name;
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  ::unlink(path.c_str());
  return fd;
}

TEST(RingQueue, GoesOnAfterWhatTheKernelPutsOff) {
  const auto queue = io::make_ring_queue(2, {&refuse});
  if (!queue) GTEST_SKIP() << "no io_uring here";
  const int fd = unnamed_file("deeptide_ring_test");
  ASSERT_GE(fd, 0);
  std::string written = "what the file keeps", read(written.size(), ' ');
  const auto bytes = static_cast<int64_t>(written.size());
  g_refusals = 3;
  EXPECT_EQ(queue->wait(queue->start({fd, 0, written.data(), bytes, /*read=*/false})), 0);
  EXPECT_LT(g_refusals, 3);
  g_refusals = 2;
  EXPECT_EQ(queue->wait(queue->start({fd, 0, read.data(), bytes, /*read=*/true})), 0);
  EXPECT_EQ(read, written);
  const pid_t child = ::fork();
  if (child == 0) {
    bool refused = false;
    try {
      queue->start({fd, 0, read.data(), bytes, /*read=*/true});
    } catch (const std::runtime_error&) {
      refused = true;
    }
    ::_exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(queue->wait(queue->start({fd, 0, read.data(), bytes, /*read=*/true})), 0);
  ::close(fd);
}

int g_put_off[] = {-EAGAIN, -EINTR, -EBUSY};
int g_answers = 0;

int put_off(int result) { return g_answers < 3 ? g_put_off[g_answers++] : result; }

TEST(RingQueue, StartsAgainWhatTheKernelPutsOffAndEndsWithIt) {
  const int fd = unnamed_file("deeptide_ring_results_test");
  ASSERT_GE(fd, 0);
  std::string written = "what the file keeps", read(written.size(), ' ');
  const auto bytes = static_cast<int64_t>(written.size());
  auto queue = io::make_ring_queue(2, {&refuse, &put_off});
  if (!queue) GTEST_SKIP() << "no io_uring here";
  EXPECT_EQ(queue->wait(queue->start({fd, 0, written.data(), bytes, /*read=*/false})), 0);
  EXPECT_EQ(g_answers, 3);
  g_answers = 0;
  g_refusals = 2;
  queue->start({fd, 0, read.data(), bytes, /*read=*/true});
  queue.reset();  // waits for what is under way, whatever the kernel puts off
  EXPECT_EQ(g_answers, 3);
  EXPECT_EQ(read, written);
  ::close(fd);
}

}  // namespace
}  // namespace deeptide::tiers
