// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Published units under way: operators wait for what they touch and for nothing else, and no failure is lost.
#include "zero/transfers/arrivals.h"

#include <ATen/ops/add.h>
#include <ATen/ops/full.h>

#include <atomic>
#include <functional>
#include <thread>

#include "errors.h"
#include "on_hosts.h"
#include "sharding/gate.h"
#include "zero/stage.h"

namespace deeptide::zero {
namespace {

using at::Tensor;
using sharding::Parameter;
using sharding::Unit;

/// Ranks of hosts of one rank each, and of two.
const std::vector<int> kHosts[] = {{0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 0, 1, 1}, {0, 1, 1, 0}};

/// Units of one parameter each, whole on every rank; each rank has its number in its shards, and -1 elsewhere.
struct Published {
  explicit Published(const World& world, int num_units = 3, int64_t numel = 200)
      : board(board_of(world)),
        group(world, comm::Team::whole(world), "gathers",
              {.timeout = kLong, .board = board, .host = host::Host::find(world, "host", true)}) {
    const at::NoGradGuard no_grad;
    const auto team = comm::Team::whole(world);
    std::vector<sharding::ParameterSpec> specs;
    for (int p = 0; p < num_units; ++p) specs.push_back({"p" + std::to_string(p), numel, at::kFloat, true, 0});
    for (auto& layout : sharding::build_layout(specs, {}, {world.size, /*max_unit=*/1})) {
      Parameter p;
      p.name = specs[units.size()].name;
      p.tensors = {tensors.emplace_back(at::full({numel}, -1.0f))};
      p.numel = numel;
      std::vector<Parameter> members;
      members.push_back(std::move(p));
      const int index = static_cast<int>(units.size());
      units.push_back(std::make_unique<Unit>(index, std::move(layout), std::move(members),
                                             sharding::UnitPlacement{sharding::UnitMemory::whole, team, team}));
      Unit& unit = *units.back();
      Tensor whole = device::allocate_flat(ledger, device::Role::parameters, unit.numel(), at::kFloat, at::kCPU);
      unit.pack(whole);
      unit.adopt(std::move(whole), ledger);
      unit.shard().in_place().fill_(static_cast<float>(world.rank));
      all.push_back(&unit);
    }
    arrivals = std::make_unique<Arrivals>(all, group, at::kCPU);
  }

  void start_all() {
    for (Unit* unit : all) arrivals->start(*unit);
  }
  /// Whether an operator finds every rank's number in its place.
  bool has_arrived(int unit) const {
    const Tensor found = tensors[unit].clone();
    for (int64_t i = 0; i < found.numel(); ++i) {
      if (found.const_data_ptr<float>()[i] != static_cast<float>(i / all[unit]->layout().shard)) return false;
    }
    return true;
  }

  std::shared_ptr<device::Ledger> ledger = std::make_shared<device::Ledger>();
  std::shared_ptr<world::FailureBoard> board;
  comm::Group group;
  std::vector<Tensor> tensors;
  std::vector<std::unique_ptr<Unit>> units;
  std::vector<Unit*> all;
  std::unique_ptr<Arrivals> arrivals;
};

TEST(Arrivals, ComeWhileTheProgramGoesOnAndAreWaitedForOneByOne) {
  for (const std::vector<int>& hosts : kHosts) {
    const int size = static_cast<int>(hosts.size());
    std::atomic<int> ahead{0};  // ranks that have returned from all starts, and looked
    run_on_hosts(hosts, [&](const World& world) {
      Published model(world);
      // The last rank publishes once all others have: none of them may have waited for it.
      while (world.rank == size - 1 && ahead < size - 1) std::this_thread::yield();
      model.start_all();
      for (const Unit* unit : model.all) EXPECT_TRUE(unit->is_hidden());
      const std::string text = error_of([&] { (void)model.tensors[1].data_ptr(); });
      EXPECT_NE(text.find("parameter 'p1' was accessed directly while the last step's values are on their way"),
                std::string::npos)
          << text;
      ++ahead;
      EXPECT_TRUE(model.has_arrived(1));
      EXPECT_FALSE(model.all[0]->is_hidden()) << "started before";
      EXPECT_TRUE(model.all[2]->is_hidden()) << "nobody needs it";
      EXPECT_EQ(model.tensors[1].const_data_ptr<float>()[0], 0.0f);
      EXPECT_TRUE(model.has_arrived(0));
      (void)model.tensors[2].detach();  // may be read past all operators
      EXPECT_FALSE(model.all[2]->is_hidden());
      EXPECT_TRUE(model.has_arrived(2));
      EXPECT_EQ(model.arrivals->sent_bytes(), 3 * 4 * model.all[0]->layout().shard * (size - 1));
    });
  }
}

TEST(Arrivals, AreSentBeforeAnOperatorWrites) {
  constexpr int64_t kNumel = 4 << 20;  // too much for the buffers between two sockets
  run_on_hosts({0, 1}, [&](const World& world) {
    Published model(world, 1, kNumel);
    for (int round = 0; round < 3; ++round) {
      model.units[0]->shard().in_place().fill_(static_cast<float>(world.rank));
      model.start_all();
      if (world.rank == 0) {
        model.tensors[0].fill_(7.0f);
        EXPECT_TRUE(at::equal(model.tensors[0], at::full({kNumel}, 7.0f)));
      } else {
        EXPECT_TRUE(model.has_arrived(0)) << "what rank 0 wrote later must not travel";
      }
      model.arrivals->wait_all();
    }
  });
}

TEST(Arrivals, AreFoundByEveryThread) {
  run_on_hosts({0, 1}, [&](const World& world) {
    Published model(world, 6);
    for (int round = 0; round < 4; ++round) {
      model.start_all();
      std::vector<std::thread> readers;
      std::atomic<int> found{0};
      for (int i = 0; i < 4; ++i) {
        readers.emplace_back([&, i] {
          for (int unit = 0; unit < 6; ++unit) found += model.has_arrived((unit + i) % 6) ? 1 : 0;
        });
      }
      for (std::thread& reader : readers) reader.join();
      EXPECT_EQ(found, 24);
    }
  });
}

TEST(Arrivals, CostOperatorsNothingMoreOnceAllAreThere) {
  Meeting meeting(2);  // one count serves all ranks of the process
  run_on_hosts({0, 1}, [&](const World& world) {
    Published model(world);
    EXPECT_TRUE(sharding::has_gate_key(model.tensors[0]));
    EXPECT_FALSE(sharding::is_lent(model.tensors[0]));
    model.start_all();
    model.arrivals->wait_all();
    model.arrivals->wait_all();
    meeting.arrive();
    const int64_t before = sharding::gate_count();
    EXPECT_TRUE(model.has_arrived(2));
    EXPECT_EQ(sharding::gate_count(), before);
    meeting.arrive();
  });
}

TEST(Arrivals, TellWhoeverNeedsThemThatTheyWillNotCome) {
  const auto errors = errors_of_ranks(2, [&](World world) {
    world.host = "host " + std::to_string(world.rank);
    Published model(world);
    if (world.rank == 1) {
      model.arrivals->start(*model.all[0]);
      model.arrivals->wait_all();
      model.board->report_failure("fell over in a test");
      return;
    }
    model.start_all();
    EXPECT_TRUE(model.has_arrived(0));
    for (int i = 0; i < 2; ++i) {  // a program may catch the first and go on
      const std::string text = error_of([&] { model.tensors[2].sum(); });
      EXPECT_NE(text.find("waiting for the new values of unit 'p1' (first parameter 'p1')"), std::string::npos) << text;
      EXPECT_NE(text.find("fell over in a test"), std::string::npos) << text;
      EXPECT_NE(text.find("forward"), std::string::npos) << text;
    }
    EXPECT_NE(error_of([&] { model.arrivals->wait_all(); }).find("'p1'"), std::string::npos);
    EXPECT_TRUE(model.all[1]->is_hidden());
    model.arrivals.reset();
    EXPECT_FALSE(sharding::has_gate_key(model.tensors[1]));
    EXPECT_EQ(model.tensors[1].const_data_ptr<float>()[0], 0.0f) << "its own slice";
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(Arrivals, AreThereWhenTheEngineEnds) {
  for (const std::vector<int>& hosts : kHosts) {
    run_on_hosts(hosts, [&](const World& world) {
      Published model(world);
      model.start_all();
      model.arrivals.reset();
      for (int unit = 0; unit < 3; ++unit) EXPECT_TRUE(model.has_arrived(unit));
    });
  }
}

TEST(Arrivals, HaveTheBitsOfAStepThatWaits) {
  for (const int size : {2, 3, 4}) {
    for (const int stage : {1, 2}) {
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        run_ranks(size, [&](const World& world) {
          comm::Group group = reductions_of(world);
          const Groups groups{Hyperparameters("AdamW"), Hyperparameters("AdamW")};
          Stage plain(group, stage, dtype, optim::find_rule("AdamW"), groups);
          Stage late(group, stage, dtype, optim::find_rule("AdamW"), groups);
          comm::Group gathers(world, comm::Team::whole(world), "gathers", {.timeout = kLong, .board = board_of(world)});
          std::vector<Unit*> units;
          for (const auto& unit : late.units) units.push_back(unit.get());
          Arrivals arrivals(units, gathers, at::kCPU);
          late.optimizer->publish_through(arrivals);
          for (int step = 0; step < 3; ++step) {
            plain.step(step, groups);
            arrivals.wait_all();
            late.step(step, groups);
            EXPECT_TRUE(units.front()->is_hidden()) << "the step waited";
          }
          arrivals.wait_all();
          expect_same_bits(plain.state(), late.state());
        });
      }
    }
  }
}

}  // namespace
}  // namespace deeptide::zero
