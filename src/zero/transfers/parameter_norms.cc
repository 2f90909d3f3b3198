// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A table of doubles, all-gathered.
#include "zero/transfers/parameter_norms.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "comm/device_read.h"

namespace deeptide::zero {

using at::Tensor;

/// Slices along the tensor axis are of one parameter: all ranks have parts of it.
ParameterNorms::ParameterNorms(const std::vector<sharding::Unit*>& units, const comm::Team& all) {
  std::vector<int64_t> every(static_cast<size_t>(all.size()));
  std::iota(every.begin(), every.end(), 0);
  for (const sharding::Unit* unit : units) {
    std::vector<int64_t>& owners = owners_.emplace_back();
    for (const int rank : unit->shard_over().ranks())
      owners.push_back(world::number(all.index_of(world::WorldRank(rank))));
    counted_.push_back(unit->cut_over() ? every : owners);
    first_.push_back(num_parameters_);
    num_parameters_ += static_cast<int64_t>(unit->parameters().size());
  }
  squares_ = at::zeros({all.size(), num_parameters_, 2}, at::kDouble);
}

optim::NormSums& ParameterNorms::sums(int slice, int unit, int parameter, int64_t numel) {
  const auto owner = static_cast<int>(owners_[unit][slice]);
  return open_.try_emplace({owner, unit, parameter}, numel).first->second;
}

void ParameterNorms::settle() {
  for (const auto& [key, sums] : open_) {
    const auto [rank, unit, parameter] = key;
    const optim::NormSquares squares = sums.totals();
    double* place = squares_.mutable_data_ptr<double>() + 2 * (rank * num_parameters_ + first_[unit] + parameter);
    place[0] = squares.param;
    place[1] = squares.update;
  }
  open_.clear();
}

void ParameterNorms::exchange(comm::Group& group, at::Device device) {
  const Tensor own = squares_[group.index()].reshape({-1}).to(device);
  Tensor all = at::empty({squares_.numel()}, own.options());
  auto pending = group.all_gather(all, own);
  group.wait(pending, {"step", "gathering the norms of all parameters"});
  squares_ = read_on_host(group, all, {"step", "reading the norms of all parameters"}).view(squares_.sizes());
}

optim::NormSquares ParameterNorms::whole(int unit, int parameter) const {
  optim::NormSquares total;
  const double* squares = squares_.const_data_ptr<double>() + 2 * (first_[unit] + parameter);
  for (const int64_t rank : counted_[unit]) {
    total.param += squares[2 * rank * num_parameters_];
    total.update += squares[2 * rank * num_parameters_ + 1];
  }
  return total;
}

}  // namespace deeptide::zero
