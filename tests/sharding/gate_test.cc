// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Gives operators sharded tensors, and looks at the state that remains when they fail.
#include "sharding/gate.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <algorithm>
#include <thread>

#include "errors.h"
#include "ranks.h"
#include "sharding/sharded_tensors.h"

namespace deeptide::sharding {
namespace {

using at::Tensor;

void fill_then_fail(Tensor& x) {
  x.fill_(7.0);
  throw std::runtime_error("this operator fails half way");
}

void call_fill_then_fail(Tensor x) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("deeptide_test::fill_then_fail", "").typed<void(Tensor&)>();
  op.call(x);
}

World alone() { return make_world(c10::make_intrusive<c10d::HashStore>(), 0, 1); }

Tensor matrix(int64_t rows, int64_t columns, float first = 0) {
  return at::arange(first, first + static_cast<float>(rows * columns), at::kFloat).view({rows, columns});
}

class Gate : public testing::Test {
 protected:
  World world_ = alone();
  Tensor p_ = matrix(4, 6), q_ = matrix(6, 5, 100);
  ShardedTensors model_{world_, "gate", {p_, q_}};
};

TEST_F(Gate, GivesOperatorsTheWholeValues) {
  EXPECT_TRUE(has_gate_key(p_));
  EXPECT_TRUE(at::equal(at::mm(p_, q_), at::mm(matrix(4, 6), matrix(6, 5, 100))));
  EXPECT_EQ(p_.sizes(), at::IntArrayRef({4, 6})) << "the logical shape stays";
  EXPECT_FALSE(model_.any_pinned());
}

TEST_F(Gate, GathersNothingForViewsAndEverythingForTheirUse) {
  const auto before = gate_count();
  const Tensor view = p_.t().narrow(0, 1, 3).detach();
  EXPECT_EQ(gate_count(), before);
  EXPECT_FALSE(model_.units[0]->is_whole());
  EXPECT_TRUE(has_gate_key(view));
  EXPECT_TRUE(at::equal(view.clone(), matrix(4, 6).t().narrow(0, 1, 3)));
  EXPECT_GT(gate_count(), before);
  EXPECT_FALSE(has_gate_key(view.clone())) << "results are plain tensors";
}

TEST_F(Gate, LeavesOtherTensorsAlone) {
  const auto before = gate_count();
  at::mm(at::ones({3, 3}), at::ones({3, 3}));
  EXPECT_EQ(gate_count(), before);
}

TEST_F(Gate, SeesListsAndOptionalLists) {
  const Tensor flat = at::cat({p_.view({-1}), q_.view({-1})});
  EXPECT_TRUE(at::equal(flat, at::cat({matrix(4, 6).view({-1}), matrix(6, 5, 100).view({-1})})));
  const auto doubled = at::_foreach_mul({p_, q_}, 2.0);
  EXPECT_TRUE(at::equal(doubled[1], matrix(6, 5, 100) * 2));
  c10::List<std::optional<Tensor>> rows;
  rows.push_back(at::full({2}, 3, at::kLong));
  EXPECT_TRUE(at::equal(at::index(p_, rows)[1], matrix(4, 6)[3]));
  EXPECT_FALSE(model_.any_pinned());
}

TEST_F(Gate, BringsWhatIsWrittenIntoTheShard) {
  p_.mul_(2.0);
  p_.t()[5].fill_(-1.0);  // through a view
  Tensor expected = matrix(4, 6) * 2;
  expected.t()[5].fill_(-1.0);
  model_.close();
  EXPECT_TRUE(model_.rewritten(0));
  EXPECT_FALSE(model_.rewritten(1));
  model_.residency->release_all();
  EXPECT_FALSE(model_.units[0]->is_whole());
  EXPECT_TRUE(at::equal(p_.clone(), expected));
}

TEST_F(Gate, WritesToAnOutArgument) {
  Tensor out = p_;
  const Tensor left = matrix(4, 6, 50);
  at::add_out(out, left, left);
  model_.close();
  model_.residency->release_all();
  EXPECT_TRUE(at::equal(p_.clone(), left * 2));
}

TEST_F(Gate, LeavesNothingPinnedWhenAnOperatorThrows) {
  EXPECT_NE(error_of([&] { at::mm(q_, q_); }), "none");
  EXPECT_FALSE(model_.any_pinned());
  EXPECT_NE(error_of([&] { at::cat({p_, q_}); }), "none");
  EXPECT_FALSE(model_.any_pinned());
  EXPECT_TRUE(at::equal(at::mm(p_, q_), at::mm(matrix(4, 6), matrix(6, 5, 100))));
}

TEST_F(Gate, ForgetsWhatAFailedOperatorHasHalfWritten) {
  p_.sum();  // whole now
  EXPECT_NE(error_of([&] { call_fill_then_fail(p_); }).find("fails half way"), std::string::npos);
  EXPECT_FALSE(model_.any_pinned());
  EXPECT_FALSE(model_.rewritten(0));
  EXPECT_TRUE(at::equal(p_.clone(), matrix(4, 6))) << "the shards are the truth";
}

TEST_F(Gate, TellsRawAccessTheParameterAndTheCure) {
  for (const bool gathered : {false, true}) {
    if (gathered) p_.sum();
    for (const auto& access :
         std::vector<std::function<void()>>{[&] { (void)p_.data_ptr(); }, [&] { (void)p_.const_data_ptr<float>(); },
                                            [&] { (void)p_.t().mutable_data_ptr(); }}) {
      const std::string text = error_of(access);
      EXPECT_NE(text.find("parameter 'p0' was accessed directly while it is sharded"), std::string::npos) << text;
      EXPECT_NE(text.find("module_state_dict"), std::string::npos) << text;
    }
  }
}

TEST_F(Gate, LetsCompiledKernelsReadAddresses) {
  bool ran = false;
  run_as_operator({p_.t(), q_}, {false, false}, [&] {
    ran = true;
    EXPECT_TRUE(model_.units[0]->is_pinned() && model_.units[1]->is_pinned());
    EXPECT_EQ(p_.const_data_ptr<float>()[7], 7);
    EXPECT_EQ(q_.const_data_ptr<float>()[7], 107);
    const auto before = gate_count();
    EXPECT_TRUE(at::equal(at::mm(p_, q_), at::mm(matrix(4, 6), matrix(6, 5, 100))));
    EXPECT_EQ(gate_count(), before) << "operators within do not wait again";
  });
  EXPECT_TRUE(ran);
  EXPECT_FALSE(model_.any_pinned());
  EXPECT_NE(error_of([&] { (void)p_.data_ptr(); }), "none");
}

TEST_F(Gate, TakesOverWhatCompiledKernelsWrite) {
  run_as_operator({p_, q_}, {true, false}, [&] {
    std::fill_n(p_.mutable_data_ptr<float>(), p_.numel(), 3.0F);
    q_.mutable_data_ptr<float>()[0] = -1;  // not said: it does not last
  });
  model_.close();
  EXPECT_TRUE(model_.rewritten(0));
  EXPECT_FALSE(model_.rewritten(1));
  model_.residency->release_all();
  EXPECT_TRUE(at::equal(p_.clone(), at::full({4, 6}, 3.0)));
  EXPECT_TRUE(at::equal(q_.clone(), matrix(6, 5, 100)));
}

TEST_F(Gate, LeavesNothingPinnedWhenCompiledKernelsThrow) {
  const std::string text = error_of([&] {
    run_as_operator({p_, q_}, {true, false}, [&] {
      std::fill_n(p_.mutable_data_ptr<float>(), p_.numel(), 3.0F);
      throw std::runtime_error("this kernel fails half way");
    });
  });
  EXPECT_NE(text.find("fails half way"), std::string::npos);
  EXPECT_FALSE(model_.any_pinned());
  EXPECT_TRUE(at::equal(p_.clone(), matrix(4, 6))) << "the shards are the truth";
}

TEST_F(Gate, TellsUnitsApart) {
  EXPECT_NE(lent_unit(p_), 0U);
  EXPECT_NE(lent_unit(p_), lent_unit(q_));
  EXPECT_EQ(lent_unit(p_.t()), lent_unit(p_));
  EXPECT_EQ(lent_unit(p_.clone()), 0U);
}

TEST_F(Gate, LetsAClonedParameterBeUsedFreely) {
  const Tensor copy = p_.clone();
  EXPECT_EQ(copy.const_data_ptr<float>()[7], 7.0f);
}

TEST(GateLifetime, LeavesTensorsAndTheirViewsSafeAfterTheEnd) {
  Tensor p = matrix(4, 6), view;
  const World world = alone();
  {
    ShardedTensors model(world, "short", {p});
    view = p.t();
    p.sum();
  }
  EXPECT_FALSE(has_gate_key(p));
  EXPECT_TRUE(has_gate_key(view)) << "nobody knows all views";
  for (const Tensor& t : {p, view}) {
    const std::string text = error_of([&] { t.clone(); });
    EXPECT_NE(text.find("'p0' was accessed directly after its engine was destroyed"), std::string::npos) << text;
  }
}

TEST(GateLifetime, ReturnsEveryByte) {
  const World world = alone();
  auto model = std::make_unique<ShardedTensors>(world, "bytes", std::vector<Tensor>{matrix(40, 60)});
  const auto ledger = model->ledger;
  model->tensors[0].sum();
  EXPECT_GT(ledger->current(device::Role::gathered), 0);
  model.reset();
  EXPECT_EQ(ledger->current(device::Role::gathered), 0);
  EXPECT_EQ(ledger->current(device::Role::parameters), 0);
}

TEST(GateThreads, EveryThreadFindsItsParametersWhole) {
  const World world = alone();
  std::vector<Tensor> tensors;
  for (int i = 0; i < 6; ++i) tensors.push_back(at::full({200 + 100 * i}, static_cast<float>(i)));
  ShardedTensors model(world, "threads", tensors, {.max_live = 1000, .prefetch = 500, .max_reuse_distance = 300});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      at::set_num_threads(1);
      at::NoGradGuard no_grad;
      for (int step = 0; step < 200; ++step) {
        const int i = (step * (t + 1) + t) % 6, j = (step + t) % 6;
        const Tensor sum = tensors[i].max() + tensors[j].max();
        if (sum.item<float>() != static_cast<float>(i + j)) ADD_FAILURE() << "thread " << t << " step " << step;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_FALSE(model.any_pinned());
}

TEST(GateOfTwoEngines, HoldsParametersOfBothInOneOperator) {
  run_ranks(2, [](const World& world) {
    const Tensor p = matrix(3, 3), q = matrix(3, 3, 10);
    ShardedTensors first(world, "first", {p}), second(world, "second", {q});
    EXPECT_TRUE(at::equal(at::mm(q, p), at::mm(matrix(3, 3, 10), matrix(3, 3))));
    first.close();
    second.close();
  });
}

TEST(GateOfTwoEngines, LeavesTheFirstUnpinnedWhenTheSecondsPeersDoNotCome) {
  run_ranks(2, [](const World& world) {
    const Tensor p = matrix(3, 3), q = matrix(3, 3, 10);
    ShardedTensors first(world, "first", {p});
    ShardedTensors second(world, "second", {q}, {}, 1, std::chrono::milliseconds(1000));
    if (world.rank == 0) {
      const std::string text = error_of([&] { at::mm(p, q); });
      EXPECT_NE(text.find("unit 'p0'"), std::string::npos) << text;
      EXPECT_NE(text.find("rank 1 is in another engine and waits"), std::string::npos) << text;
      EXPECT_FALSE(first.any_pinned());
      EXPECT_FALSE(second.any_pinned());
      EXPECT_NE(error_of([&] { (void)p.data_ptr(); }), "none") << "closed again";
    } else {
      p.sum();
    }
    first.close();
  });
}

}  // namespace
}  // namespace deeptide::sharding

TORCH_LIBRARY(deeptide_test, library) {
  library.def("fill_then_fail(Tensor(a!) x) -> ()");
  library.impl("fill_then_fail", c10::DispatchKey::CPU, TORCH_FN(deeptide::sharding::fill_then_fail));
}
