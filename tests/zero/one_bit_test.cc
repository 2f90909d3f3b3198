// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Steps by signs equal a simulation of the compressed algorithm in doubles, on dense tensors and in one process.
#include <ATen/ops/allclose.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <tuple>

#include "optim/compressed/compressed_rule.h"
#include "zero/stage.h"

namespace deeptide::zero {
namespace {

constexpr int kWarmUp = 3, kCompressed = 12;

Tensor own_gradient(int p, int step, int rank) {
  return (at::arange(kSizes[p], at::kFloat) + 3.0 * rank + 1.0).sin() * (1 + step % 5);
}

/// scale * sign, with scale the root of the mean square.
Tensor signs_of(const Tensor& x) {
  const Tensor scale = x.square().mean().sqrt();
  return at::where(x.ge(0), scale, -scale);
}

/// One parameter on all ranks. `cuts`: where its pieces end, ascending.
struct Simulated {
  Simulated(int number, int ranks, std::vector<int64_t> where)
      : p(number), cuts(std::move(where)), errors(ranks), master(start_of(p).to(at::kDouble)) {
    m = v = served = at::zeros({kSizes[p]}, at::kDouble);
    for (Tensor& error : errors) error = at::zeros({kSizes[p]}, at::kDouble);
  }

  void step(int count, const Hyperparameters& hyper, bool by_signs) {
    const double beta1 = hyper.get("beta1"), beta2 = hyper.get("beta2"), lr = hyper.lr();
    const Tensor old_m = m;
    const auto ranks = static_cast<int>(errors.size());
    std::vector<Tensor> gradients;
    for (int rank = 0; rank < ranks; ++rank) gradients.push_back(own_gradient(p, count, rank).to(at::kDouble));
    if (!by_signs) {
      Tensor mean = at::zeros_like(m);
      for (const Tensor& gradient : gradients) mean = mean + gradient / ranks;
      m = m * beta1 + mean * (1 - beta1);
      v = v * beta2 + mean.square() * (1 - beta2);
    } else {
      exchange(gradients, beta1);
    }
    if (hyper.has("coeff_beta")) return step_lamb(hyper, (m - old_m * beta1) / (1 - beta1), by_signs);
    master = master * (1 - lr * hyper.get("weight_decay")) - m / (v.sqrt() + hyper.get("eps")) * lr;
  }

  /// `gradient`: what the moved momentum says that it was.
  void step_lamb(const Hyperparameters& hyper, const Tensor& gradient, bool by_signs) {
    const double beta2 = hyper.get("beta2"), eps = hyper.get("eps"), decay = hyper.get("weight_decay");
    const Tensor direction = m / (v.sqrt() + eps), update = direction + master * decay;
    const double length = update.norm().item<double>(), norm = master.norm().item<double>();
    double ratio = 1.0;
    if (!by_signs) {
      if (norm > 0 && length > 0) ratio = std::clamp(norm / length, hyper.get("min_coeff"), hyper.get("max_coeff"));
      const double keep = hyper.get("coeff_beta");
      if (ratio != 1.0) coefficient = coefficient * keep + ratio * (1 - keep);
      fresh = v.clone();
    } else {
      fresh = fresh * beta2 + gradient.square() * (1 - beta2);
      double factor = ((v.sqrt() + eps) / (fresh.sqrt() + eps)).max().item<double>();
      const double share = decay > 0 ? std::min(1.0, direction.norm().item<double>() / length) : 1.0;
      factor = std::clamp(factor * share + 1 - share, hyper.get("factor_min"), hyper.get("factor_max"));
      const double threshold = hyper.get("factor_threshold");
      last_factor = std::clamp(factor, last_factor * (1 - threshold), last_factor * (1 + threshold));
      ratio = coefficient * last_factor;
    }
    master = master - update * (hyper.lr() * ratio);
  }

  void exchange(const std::vector<Tensor>& gradients, double beta1) {
    const auto ranks = static_cast<double>(errors.size());
    if (errors.size() == 1) {
      m = m * beta1 + gradients[0] * (1 - beta1);
      return;
    }
    for (size_t rank = 0; rank < errors.size(); ++rank) errors[rank] += m * beta1 + gradients[rank] * (1 - beta1);
    m = at::zeros_like(m);
    int64_t begin = 0;
    for (const int64_t end : cuts) {
      Tensor sum = served.narrow(0, begin, end - begin);
      for (Tensor& error : errors) {
        Tensor part = error.narrow(0, begin, end - begin);
        const Tensor sent = signs_of(part);
        part.sub_(sent);
        sum.add_(sent / ranks);
      }
      const Tensor mean = signs_of(sum);
      m.narrow(0, begin, end - begin).copy_(mean);
      sum.sub_(mean);
      begin = end;
    }
  }

  int p;
  std::vector<int64_t> cuts;
  std::vector<Tensor> errors;  // by rank
  Tensor master, m, v, served;
  Tensor fresh;  // LAMB's, as are the numbers
  double coefficient = 0.0, last_factor = 1.0;
};

std::vector<Simulated> simulations(const Stage& stage, int ranks) {
  std::vector<Simulated> all;
  for (const auto& unit : stage.units) {
    const int64_t shard = unit->numel() / ranks;
    for (const Parameter& parameter : unit->parameters()) {
      std::vector<int64_t> cuts;
      for (int64_t end = shard; end < unit->numel() + shard; end += shard) {
        const int64_t cut = std::clamp<int64_t>(end - parameter.offset, 0, parameter.numel);
        if (cut > (cuts.empty() ? 0 : cuts.back())) cuts.push_back(cut);
      }
      all.emplace_back(stage.number(parameter), ranks, std::move(cuts));
    }
  }
  return all;
}

bool by_signs(int count, const Groups& groups) {
  return optim::exchanged_by(optim::find_rule(groups[0].optimizer()->name), groups, count + 1) ==
         optim::Exchanged::signs;
}

void step_ranks(Stage& stage, int count, int rank, const Groups& groups, const ActiveParameters& active = {}) {
  const bool local = by_signs(count, groups);
  stage.reducer->set_local(local);
  for (size_t u = stage.units.size(); u-- > 0;) {
    const auto& parameters = stage.units[u]->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!active.has(static_cast<int>(u), static_cast<int>(i))) continue;
      stage.reducer->add(static_cast<int>(u), static_cast<int>(i),
                         own_gradient(stage.number(parameters[i]), count, rank));
    }
  }
  stage.reducer->finish(local ? 0 : 1);
  stage.optimizer->step(*stage.reducer, 1.0, groups, active);
  stage.reducer->clear_accumulated();
}

Groups groups_of(const char* type) {
  Hyperparameters plain(type);
  if (plain.has("freeze_step")) plain.set("freeze_step", kWarmUp);
  if (plain.has("var_update_scaler")) plain.set("var_update_scaler", 2).set("var_freeze_step", 10);
  Hyperparameters other = plain;
  other.set("lr", 0.01).set("weight_decay", 0.1).set("beta1", 0.5).set("eps", 1e-3);
  return {plain, other};
}

class BySignsInWorlds : public testing::TestWithParam<std::tuple<const char*, int>> {};

TEST_P(BySignsInWorlds, StepsAsItsSimulationDoes) {
  const auto [type, ranks] = GetParam();
  const Groups groups = groups_of(type);
  run_ranks(ranks, [&, type = type, ranks = ranks](const World& world) {
    comm::Group group = reductions_of(world);
    Stage stage(group, 0, at::kFloat, optim::find_rule(type), groups);
    auto simulated = simulations(stage, ranks);
    for (int count = 0; count < kWarmUp + kCompressed; ++count) {
      step_ranks(stage, count, world.rank, groups);
      for (Simulated& one : simulated) one.step(count, groups[one.p / 2], by_signs(count, groups));
    }
    const auto state = stage.state();
    for (const Simulated& one : simulated) {
      const std::string name = "p" + std::to_string(one.p);
      // A few hundred roundings of fp32 in 15 steps; a sign that they turned would show as a whole scale.
      const auto expect = [&](const char* role, const Tensor& expected) {
        EXPECT_TRUE(at::allclose(state.at(name + role).to(at::kDouble), expected, 2e-5, 2e-6)) << name << role;
      };
      expect("/exp_avg", one.m);
      expect("/exp_avg_sq", one.v);
      expect("/master", one.master);
      if (one.fresh.defined()) expect("/exp_avg_sq_fresh", one.fresh);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, BySignsInWorlds,
                         testing::Combine(testing::Values("OneBitAdam", "ZeroOneAdam", "OneBitLamb"),
                                          testing::Values(1, 2, 3, 4)));

TEST(OneBitAdam, LeavesParametersWithoutAGradientAndTheirErrorsAlone) {
  const Groups groups = groups_of("OneBitAdam");
  run_ranks(2, [&](const World& world) {
    comm::Group group = reductions_of(world);
    Stage stage(group, 0, at::kFloat, optim::find_rule("OneBitAdam"), groups);
    for (int count = 0; count <= kWarmUp; ++count) step_ranks(stage, count, world.rank, groups);
    const auto before = stage.state();
    const Tensor carried = stage.optimizer->signs()->carried(0).clone();
    ActiveParameters active;
    for (const auto& unit : stage.units) active.by_unit.emplace_back(unit->parameters().size(), true);
    active.by_unit[0][0] = false;
    const Parameter& left = stage.units[0]->parameters()[0];
    step_ranks(stage, kWarmUp + 1, world.rank, groups, active);
    const auto after = stage.state();
    for (const char* role : {"/master", "/exp_avg", "/exp_avg_sq"}) {
      EXPECT_TRUE(at::equal(before.at(left.name + role), after.at(left.name + role))) << role;
      EXPECT_EQ(at::equal(before.at("p3" + std::string(role)), after.at("p3" + std::string(role))),
                role == std::string("/exp_avg_sq"));
    }
    const auto part = [&](const Tensor& flat) { return flat.narrow(0, left.offset, left.numel); };
    EXPECT_TRUE(at::equal(part(carried), part(stage.optimizer->signs()->carried(0))));
  });
}

TEST(OneBitLamb, GoesOnByTheNumbersOfItsParameters) {
  const Groups groups = groups_of("OneBitLamb");
  run_ranks(2, [&](const World& world) {
    comm::Group group = reductions_of(world);
    Stage stage(group, 0, at::kFloat, optim::find_rule("OneBitLamb"), groups);
    EXPECT_EQ(stage.optimizer->counts().parameter_numbers().at("p0"), (std::vector<double>{0.0, 1.0, 0.0}));
    for (int count = 0; count < kWarmUp; ++count) step_ranks(stage, count, world.rank, groups);
    const auto warm = stage.optimizer->counts().parameter_numbers();
    step_ranks(stage, kWarmUp, world.rank, groups);
    const auto frozen = stage.optimizer->counts().parameter_numbers();
    for (const char* name : {"p0", "p1", "p2", "p3"}) {
      EXPECT_EQ(warm.at(name)[1], 1.0);
      EXPECT_EQ(frozen.at(name)[0], warm.at(name)[0]) << "the ratio's mean is frozen";
      EXPECT_NE(frozen.at(name)[1], 1.0) << name;
      EXPECT_GE(frozen.at(name)[1], 0.9 - 1e-12) << "a step moves it by the threshold";
      EXPECT_LE(frozen.at(name)[1], 1.1 + 1e-12);
      EXPECT_EQ(frozen.at(name)[2], 1.0);
    }
    stage.optimizer->counts().set_parameter_numbers({{"p1", warm.at("p1")}});
    EXPECT_EQ(stage.optimizer->counts().parameter_numbers().at("p1"), warm.at("p1"));
    EXPECT_EQ(stage.optimizer->counts().parameter_numbers().at("p0"), (std::vector<double>{0.0, 1.0, 0.0}));
  });
}

TEST(OneBitAdam, SendsOneBitPerElementAndAScalePerPiece) {
  const Groups groups = groups_of("OneBitAdam");
  run_ranks(2, [&](const World& world) {
    comm::Group group = reductions_of(world);
    Stage stage(group, 0, at::kFloat, optim::find_rule("OneBitAdam"), groups);
    step_ranks(stage, 0, world.rank, groups);
    const int64_t dense = stage.group.sent_bytes();
    int64_t elements = 0;
    for (const auto& unit : stage.units) elements += unit->numel();
    EXPECT_EQ(dense, 2 * elements * 4 / 2);  // half is another's: an all-to-all, and an all-gather of the means
    for (int count = 1; count <= kWarmUp; ++count) step_ranks(stage, count, world.rank, groups);
    const int64_t compressed = stage.group.sent_bytes() - kWarmUp * dense;
    EXPECT_EQ(compressed, stage.optimizer->signs()->bytes_per_step());
    EXPECT_GE(compressed, dense / 32);
    // At most four pieces per slice, padded to 16 bytes as the signs are.
    EXPECT_LE(compressed, dense / 32 + 2 * 2 * 32 * static_cast<int64_t>(stage.units.size()));
  });
}

}  // namespace
}  // namespace deeptide::zero
