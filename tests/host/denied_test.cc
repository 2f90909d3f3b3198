// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Old kernels and strict containers: ranks work with fewer system calls and still notice a dead rank.
#include "denied.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "host/arena.h"
#include "host/process_watch.h"
#include "on_hosts.h"
#include "processes.h"

namespace deeptide::host {
namespace {

using at::Tensor;
using device::Role;

#ifndef SYS_pidfd_open
constexpr long SYS_pidfd_open = 434;
#endif
constexpr uint32_t kPopulateWrite = 23, kCloseOnExec = 1, kNoexecSeal = 8;
const comm::Site kReducing{"backward", "reducing unit 'h.3'"};

bool can_deny() {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(deny({{SYS_pidfd_open, ENOSYS}}) ? 0 : 1);
  int status = 0;
  ::waitpid(pid, &status, 0);
  return status == 0;
}

#define SKIP_IF_NOTHING_CAN_BE_DENIED() \
  if (!can_deny()) GTEST_SKIP() << "this kernel filters no system calls"

/// Runs two ranks as processes; returns the error of each, or "".
std::vector<std::string> errors_of_processes(const RankMain& rank_main) {
  RankProcesses ranks(2, rank_main);
  std::vector<std::string> errors;
  for (const auto& outcome : ranks.wait(std::chrono::seconds(60))) {
    EXPECT_TRUE(outcome.ended_in_time);
    errors.push_back(outcome.error);
  }
  return errors;
}

void expect_in(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
}

/// Ranks that share memory in spite of what is denied, and exchange through it.
void expect_shared(const World& world, std::initializer_list<Denied> denied) {
  TORCH_CHECK(deny(denied));
  const auto host = Host::find(world, "host", true);
  TORCH_CHECK(host->holds_all(), host->text());
  comm::Group group(world, comm::Team::whole(world), "test",
                    {.timeout = kLong, .board = board_of(world), .host = host, .clock = clock_at(7)});
  std::string why_not;
  const auto arena = Arena::create(*host, 8 << 20, 8 << 20, why_not);
  TORCH_CHECK(arena, why_not);
  Tensor flat = arena->allocate(std::make_shared<device::Ledger>(), Role::communication, 3 << 20);
  flat.fill_(world.rank + 1);
  const Tensor own = at::full({1}, arena->offset_of(flat), at::kLong), all = at::empty({2}, at::kLong);
  auto pending = group.all_gather(all, own);
  group.wait(pending, kReducing);
  const Tensor theirs = arena->at(all[1 - world.rank].item<int64_t>(), 3 << 20, at::kByte);
  TORCH_CHECK(theirs.eq(2 - world.rank).all().item<bool>());
  group.barrier(kReducing);
}

TEST(DeniedThreads, AreNamedAndNoPeerIsBlamed) {
  SKIP_IF_NOTHING_CAN_BE_DENIED();
  const auto errors = errors_of_processes([](const World& world) {
    TORCH_CHECK(deny({{SYS_clone3, EAGAIN}, {SYS_clone, EAGAIN}}));
    comm::Group group(world, comm::Team::whole(world), "test", {.timeout = kLong, .board = board_of(world)});
  });
  for (const std::string& error : errors) {
    expect_in(error, {"could not connect group 'test'", "the system refuses the thread"});
    EXPECT_EQ(error.find("reach each other"), std::string::npos) << error;
  }
}

TEST(Denied, PidfdLeavesTheKilledRankToBeSeenInProc) {
  SKIP_IF_NOTHING_CAN_BE_DENIED();
  RankProcesses ranks(2, [](const World& world) {
    TORCH_CHECK(deny({{SYS_pidfd_open, ENOSYS}}));
    const auto host = Host::find(world, "host", true);
    comm::Group group(world, comm::Team::whole(world), "test",
                      {.timeout = kLong, .board = board_of(world), .host = host, .clock = clock_at(7)});
    group.barrier(kReducing);
    if (world.rank == 1) ::raise(SIGKILL);
    group.barrier(kReducing);
  });
  const auto& outcomes = ranks.wait(std::chrono::seconds(50));  // less than the group's timeout
  EXPECT_TRUE(outcomes[0].ended_in_time);
  expect_in(outcomes[0].error, {"rank 0 lost its peers at step 7, backward", "rank 1's process ", " has ended"});
}

TEST(Denied, MemfdLeavesRanksApart) {
  SKIP_IF_NOTHING_CAN_BE_DENIED();
  for (const std::string& error : errors_of_processes([](const World& world) {
         TORCH_CHECK(deny({{SYS_memfd_create, EPERM}}));
         const auto host = Host::find(world, "host", true);
         TORCH_CHECK(host->text() == "no two ranks share memory, network", host->text());
       })) {
    EXPECT_EQ(error, "");
  }
}

TEST(Denied, FlagsOfMemfdDoNotMatter) {
  SKIP_IF_NOTHING_CAN_BE_DENIED();
  for (const Denied& denied : {Denied{SYS_memfd_create, EINVAL, 1, kCloseOnExec | kNoexecSeal},  // before Linux 6.3
                               Denied{SYS_memfd_create, EACCES, 1, kCloseOnExec}}) {             // vm.memfd_noexec=2
    for (const std::string& error : errors_of_processes([&](const World& world) { expect_shared(world, {denied}); })) {
      EXPECT_EQ(error, "");
    }
  }
}

TEST(Denied, PopulatingIsDoneByOtherMeans) {
  SKIP_IF_NOTHING_CAN_BE_DENIED();
  const Denied populate{SYS_madvise, EINVAL, 2, kPopulateWrite};  // before Linux 5.14
  for (const std::string& error : errors_of_processes([&](const World& world) { expect_shared(world, {populate}); })) {
    EXPECT_EQ(error, "");
  }
  const Denied allocate{SYS_fallocate, EPERM, 1, FALLOC_FL_KEEP_SIZE};
  for (const std::string& error : errors_of_processes([&](const World& world) {
         expect_shared(world, {populate, allocate});
       })) {
    EXPECT_EQ(error, "");
  }
}

TEST(Denied, ScansOfThePageMapAreDoneByEntries) {
  SKIP_IF_NOTHING_CAN_BE_DENIED();
  for (const std::string& error : errors_of_processes([&](const World& world) {
         expect_shared(world, {{SYS_ioctl, ENOTTY}});
       })) {
    EXPECT_EQ(error, "");
  }
}

/// `denied` takes effect once the ranks have found each other: memory runs out later.
std::string refused_by(std::initializer_list<Denied> denied) {
  std::string text;
  for (const std::string& error : errors_of_processes([&](const World& world) {
         const auto host = Host::find(world, "host", true);
         std::string why_not;
         const auto arena = Arena::create(*host, 4096, 8 << 20, why_not);
         TORCH_CHECK(arena, why_not);
         TORCH_CHECK(deny(denied));
         const auto ledger = std::make_shared<device::Ledger>();
         try {
           arena->allocate(ledger, Role::communication, 3 << 20);
         } catch (const std::exception& refused) {
           TORCH_CHECK(ledger->peak(Role::communication) == 0);
           throw;
         }
       })) {
    text = error;
  }
  return text;
}

TEST(Denied, MemoryIsAnErrorAndNoSignal) {
  SKIP_IF_NOTHING_CAN_BE_DENIED();
  const char* kCure = "Give the job more memory";
  // Strict overcommit, as the kernel reports it; a full file system of memory, on a kernel that cannot populate.
  expect_in(refused_by({{SYS_madvise, EFAULT, 2, kPopulateWrite}}),
            {"cannot take 3145728 bytes of shared memory", "vm.overcommit_memory is 2", kCure});
  expect_in(refused_by({{SYS_madvise, ENOMEM, 2, kPopulateWrite}}), {"Cannot allocate memory", kCure});
  expect_in(refused_by({{SYS_madvise, EINVAL, 2, kPopulateWrite}, {SYS_fallocate, ENOSPC, 1, FALLOC_FL_KEEP_SIZE}}),
            {"cannot take 3145728 bytes of shared memory", "No space left on device", kCure});
}

/// Starts a child that lives until it is killed; returns its pid.
class Child {
 public:
  Child() {
    TORCH_CHECK(::pipe(ends_) == 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(ends_[1]);
      char byte;
      ::_exit(::read(ends_[0], &byte, 1) < 0 ? 1 : 0);
    }
    ::close(ends_[0]);
  }
  ~Child() {
    end();
    ::waitpid(pid_, nullptr, 0);
  }
  int pid() const { return pid_; }
  void end() {
    if (ends_[1] >= 0) ::close(std::exchange(ends_[1], -1));
  }
  /// Ends it, and leaves it as a zombie.
  void die() {
    end();
    siginfo_t info;
    TORCH_CHECK(::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT) == 0);
  }

 private:
  int ends_[2];
  pid_t pid_;
};

TEST(ProcessWatch, SeesAProcessEndByEachWay) {
  for (const WatchBy way : {WatchBy::descriptor, WatchBy::start_time, WatchBy::signal}) {
    int pid = 0;
    {
      Child child;
      pid = child.pid();
      const ProcessWatch watch(pid, way);
      EXPECT_EQ(watch.by(), way);
      EXPECT_FALSE(watch.has_ended());
      child.die();
      EXPECT_EQ(watch.has_ended(), way != WatchBy::signal) << "a zombie";
    }
    const ProcessWatch late(pid, way);
    EXPECT_TRUE(late.has_ended()) << "ended before the watch began";
  }
}

TEST(ProcessWatch, SeesByASignalOnlyThatTheNumberIsFree) {
  auto child = std::make_unique<Child>();
  const ProcessWatch watch(child->pid(), WatchBy::signal);
  EXPECT_FALSE(watch.has_ended());
  child.reset();
  EXPECT_TRUE(watch.has_ended());
}

TEST(ProcessWatch, SaysWhyABetterWayIsClosed) {
  SKIP_IF_NOTHING_CAN_BE_DENIED();
  for (const std::string& error : errors_of_processes([](const World&) {
         TORCH_CHECK(deny({{SYS_pidfd_open, EPERM}}));
         const ProcessWatch watch(::getppid());
         TORCH_CHECK(watch.by() == WatchBy::start_time && !watch.has_ended());
         TORCH_CHECK(watch.why_not() == "pidfd_open: Operation not permitted", watch.why_not());
       })) {
    EXPECT_EQ(error, "");
  }
}

}  // namespace
}  // namespace deeptide::host
