// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Tensors that lie elsewhere come back as they were, whatever their form, their number and the order; faults are named.
#include "tiers/spill/spill.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <map>
#include <random>
#include <thread>

#include "checkpoint/scratch.h"
#include "tiers/swap_file.h"

namespace deeptide::tiers {
namespace {

using at::Tensor;

struct SpillTest : testing::TestWithParam<bool> {
  std::unique_ptr<Spill> make(int num_slots = 4, int folders = 2) {
    if (!GetParam()) return spill_to_host(ledger);
    OffloadOptions options{{}, num_slots};
    for (int i = 0; i < folders; ++i) options.folders.push_back(folder.path() + "/" + std::to_string(i));
    return spill_to_files(options, ledger, at::kCPU);
  }

  checkpoint::Scratch folder;
  std::shared_ptr<device::Ledger> ledger = std::make_shared<device::Ledger>();
};

TEST_P(SpillTest, EveryFormComesBackInItsStridesAndValues) {
  const auto spill = make();
  const Tensor base = at::randn({6, 40, 70});
  const std::vector<Tensor> tensors{
      base,
      base.transpose(0, 2),
      base.narrow(2, 3, 50),
      base[2].t(),
      base.to(at::kBFloat16),
      base.gt(0),
      base.to(at::kLong),
      at::complex(base[0], base[1]).conj(),
      at::arange(7, at::kByte),
      at::randn({}),
      at::randn({3, 0, 2}),
      at::randn({1, 4, 1, 9}).transpose(1, 3),
      at::randn({5}).expand({300, 5}),
  };
  for (const Tensor& tensor : tensors) {
    const Tensor back = spill->get(spill->put(tensor));
    EXPECT_TRUE(at::equal(back, tensor)) << tensor.sizes();
    EXPECT_EQ(back.dtype(), tensor.dtype());
    if (tensor.is_non_overlapping_and_dense()) {
      EXPECT_EQ(back.strides(), tensor.strides());
    }
    if (tensor.numel() > 0) {
      EXPECT_NE(back.storage().data(), tensor.storage().data());
    }
  }
}

TEST_P(SpillTest, ValuesAreThoseOfThePutWhateverIsWrittenLater) {
  const auto spill = make();
  Tensor tensor = at::randn({1000});
  const Tensor was = tensor.clone();
  const auto id = spill->put(tensor);
  tensor.zero_();
  EXPECT_TRUE(at::equal(spill->get(id), was));
  EXPECT_TRUE(at::equal(spill->get(id), was)) << "as often as it is wanted";
}

TEST_P(SpillTest, AnyOrderOfPutsGetsAndDropsGivesWhatWasPut) {
  for (unsigned seed = 0; seed < 2; ++seed) {
    std::mt19937 draw(seed);
    const auto spill = make(4 + static_cast<int>(draw() % 3), 1 + static_cast<int>(draw() % 3));
    std::map<Spill::Id, Tensor> kept;
    for (int turn = 0; turn < 200; ++turn) {
      if (kept.empty() || draw() % 3 == 0) {
        const int64_t numel = draw() % 10 == 0 ? 3'000'000 : 1 + static_cast<int64_t>(draw() % 200'000);
        const Tensor tensor = at::randint(1 << 30, {numel}, at::kInt);
        kept[spill->put(tensor)] = tensor;
        continue;
      }
      auto chosen = draw() % 2 == 0 ? std::prev(kept.end()) : std::next(kept.begin(), draw() % kept.size());
      ASSERT_TRUE(at::equal(spill->get(chosen->first), chosen->second)) << "seed " << seed << ", turn " << turn;
      if (draw() % 3 == 0) continue;
      spill->drop(chosen->first);
      kept.erase(chosen);
    }
  }
}

TEST_P(SpillTest, CountsWhatItHoldsAndNothingAfterwards) {
  const Tensor tensor = at::randn({1 << 20});
  auto spill = make();
  const auto one = spill->put(tensor), other = spill->put(tensor);
  spill->drop(one);
  EXPECT_EQ(spill->peak_bytes(), 8 << 20);
  const int64_t on_host = ledger->current(device::Role::host_activations);
  EXPECT_EQ(on_host, GetParam() ? 0 : 4 << 20);
  EXPECT_EQ(ledger->current(device::Role::activations), GetParam() ? 4 * kSwapBlockBytes : 0);
  spill->drop(other);
  spill->drop(other);
  EXPECT_EQ(ledger->current(device::Role::host_activations), 0);
  spill->put(tensor);
  spill.reset();
  EXPECT_EQ(ledger->current(device::Role::host_activations), 0);
  EXPECT_EQ(ledger->current(device::Role::activations), 0);
}

TEST_P(SpillTest, SeveralThreadsMayUseIt) {
  const auto spill = make();
  std::vector<std::thread> threads;
  std::array<int, 3> right{};
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      for (int turn = 0; turn < 20; ++turn) {
        const Tensor tensor = at::arange(i, i + 400'000 * (1 + turn % 3));
        const auto id = spill->put(tensor);
        right[static_cast<size_t>(i)] += at::equal(spill->get(id), tensor) ? 1 : 0;
        spill->drop(id);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, (std::array<int, 3>{20, 20, 20}));
}

TEST_P(SpillTest, AForkedChildMayDropWhatItsParentKeeps) {
  const auto spill = make();
  const Tensor tensor = at::randn({1000});
  const auto id = spill->put(tensor);
  const pid_t child = ::fork();
  if (child == 0) {
    spill->drop(id);
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(at::equal(spill->get(id), tensor));
}

INSTANTIATE_TEST_SUITE_P(Places, SpillTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Files" : "Host"; });

/// A drive with room for `blocks`, in a process of its own: the limit is the process's.
void run_with_room(int64_t blocks, const std::function<void(Spill&)>& run) {
  const checkpoint::Scratch folder;
  std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{static_cast<rlim_t>(blocks * kSwapBlockBytes), RLIM_INFINITY};
  ::setrlimit(RLIMIT_FSIZE, &limit);
  const auto ledger = std::make_shared<device::Ledger>();
  run(*spill_to_files({{folder.path()}, 4}, ledger, at::kCPU));
}

TEST(SpillToFiles, AFullDriveIsNamedAndWhatLiesThereComesBack) {
  const auto run = [](Spill& spill) {
    const Tensor tensor = at::arange(1 << 20, at::kInt);
    std::vector<Spill::Id> ids;
    std::string error;
    try {
      for (int i = 0; i < 40; ++i) ids.push_back(spill.put(tensor.add(i)));
    } catch (const std::runtime_error& full) {
      error = full.what();
    }
    bool right = error.find("cannot reserve") != std::string::npos && ids.size() == 16;
    spill.drop(ids.front());
    ids.front() = spill.put(tensor);  // there is room again
    for (size_t i = ids.size(); i-- > 0;)
      right = right && at::equal(spill.get(ids[i]), tensor.add(static_cast<int64_t>(i)));
    std::fprintf(stderr, "%s, %zu\n", error.c_str(), ids.size());
    std::_Exit(right ? 0 : 1);
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(run_with_room(16, run), testing::ExitedWithCode(0), "Set nvme_path to a folder of a file system with");
}

}  // namespace
}  // namespace deeptide::tiers
