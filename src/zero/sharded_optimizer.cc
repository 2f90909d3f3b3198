// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One kernel call per segment of each shard, what whole parameters need in between, then the all-gathers that publish.
#include "zero/sharded_optimizer.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>

#include "comm/nonzero_codec.h"
#include "optim/compressed_rule.h"

namespace deeptide::zero {

using at::Tensor;
using comm::OwnRow;
using device::Role;
using optim::CompressedRule;
using optim::NormRule;
using optim::Reach;
using optim::Segment;
using sharding::Unit;
using tiers::Access;
using tiers::Block;
using tiers::Buffer;

namespace {

StatePlacement resident_on(const std::shared_ptr<device::Ledger>& ledger, at::Device device) {
  return [ledger, device](int64_t numel, int64_t, at::ScalarType dtype) {
    return Buffer::resident(device::allocate_flat(ledger, Role::optimizer, numel, dtype, device));
  };
}

Tensor part_of(const Tensor& flat, Block block) { return flat.narrow(0, block.begin, block.count); }

/// Sums of a device lie in its memory, in one type.
const Tensor& sum_on_device(const gradients::UnitGradient& gradient) { return gradient.rows.rows.at(0); }

/// Visits the units of which some parameter moves.
template <typename Visit>
void each_moving(const std::vector<std::vector<Run>>& runs, Visit visit) {
  for (size_t unit = 0; unit < runs.size(); ++unit) {
    if (!runs[unit].empty()) visit(static_cast<int>(unit));
  }
}

bool reaches(const std::vector<Run>& runs, Reach reach) {
  return std::any_of(runs.begin(), runs.end(), [&](const Run& run) { return run.reach == reach; });
}

bool are_elementwise(const std::vector<Run>& runs) {
  return std::all_of(runs.begin(), runs.end(), [](const Run& run) { return run.reach == Reach::elementwise; });
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(std::vector<Unit*> units, const optim::Rule& rule,
                                   const std::vector<Hyperparameters>& groups, const StagePolicy& policy,
                                   std::shared_ptr<device::Ledger> ledger, comm::TeamGroups teams, at::Device device,
                                   StatePlacement place, CustomOptimizer* custom, StateTypes types)
    : states_(units, rule, groups, policy, place ? std::move(place) : resident_on(ledger, device), types,
              resident_on(ledger, device)),
      policy_(policy),
      teams_(std::move(teams)),
      group_(teams_.whole()),
      device_(device),
      pool_(ledger, Role::communication, device),
      units_(std::move(units)) {
  const bool passes = types.uses_host() && !custom;
  if (passes) {
    exchange_ = std::make_unique<HostExchange>(ledger, device, states_.largest_on_host(),
                                               /*takes_gradients=*/!types.gradients_leave);
  }
  if (const int64_t numel = passes ? states_.largest_of_matrices(groups) : 0; numel > 0) {
    host_directions_ = device::allocate_flat(ledger, Role::host_optimizer, numel, at::kBFloat16, at::kCPU);
  }
  if (const auto narrowed = states_.narrowed_bytes()) out_ = std::make_unique<ParametersOut>(ledger, device, *narrowed);
  const bool whole = !policy_.shard_optimizer || group_.size() == 1;  // elsewhere the engine refuses such rules
  if (whole && dynamic_cast<const CompressedRule*>(&rule)) {
    signs_ = std::make_unique<SignExchange>(units_, group_, ledger, device);
  }
  if (custom) custom_ = std::make_unique<CustomSteps>(states_, *custom, types.gradients_leave, std::move(ledger));
}

void ShardedOptimizer::step(gradients::Reducer& reducer, double gradient_scale,
                            const std::vector<Hyperparameters>& groups, const ActiveParameters& active) {
  at::NoGradGuard no_grad;
  states().keep(groups);
  states_.count_step();
  Publication publication(teams_, arrivals_, residency_);
  if (custom_) {
    step_by_caller(reducer, gradient_scale, groups, active, publication);
  } else if (reducer.is_local()) {
    step_by_signs(reducer, gradient_scale, groups, active);
  } else {
    step_by_rule(reducer, gradient_scale, groups, active, publication);
  }
  for (int i = 0; i < states_.num_units(); ++i) {
    units_[i]->shard().write_behind();
    for (size_t p = 0; p < units_[i]->parameters().size(); ++p) {
      if (active.has(i, static_cast<int>(p))) units_[i]->count_write(units_[i]->parameters()[p]);
    }
  }
  publication.finish();
}

void ShardedOptimizer::step_by_rule(const gradients::Reducer& reducer, double gradient_scale,
                                    const std::vector<Hyperparameters>& groups, const ActiveParameters& active,
                                    Publication& publication) {
  std::unique_ptr<ParameterNorms> norms;
  if (dynamic_cast<const NormRule*>(&rule())) norms = std::make_unique<ParameterNorms>(units_, group_.size());
  std::vector<std::vector<Run>> runs;
  for (int i = 0; i < states_.num_units(); ++i) {
    states_.refresh_masters(i);
    runs.push_back(states_.count_step(i, active, groups));
  }
  std::optional<HostExchange::Step> copies;
  if (exchange_) copies.emplace(*exchange_);
  const auto pass_of = [&](int unit, gradients::UnitGradient gradient, Side side) {
    UnitPass pass{unit, std::move(gradient), gradient_scale, groups, nullptr, copies ? &*copies : nullptr, side};
    if (!gathers_gradients()) pass.reducer = &reducer;
    return pass;
  };
  const auto pass_over = [&](int unit, gradients::UnitGradient gradient, Side side) {
    first_pass(pass_of(unit, std::move(gradient), side), runs[unit], norms.get());
  };
  if (copies && !gathers_gradients()) {
    if (!reducer.leave()) {
      each_moving(runs, [&](int unit) { announce(unit, sum_on_device(reducer.gradient(unit)), *copies); });
    }
    each_moving(runs, [&](int unit) { pass_over(unit, reducer.gradient(unit), Side::device); });
  }
  UnitGathers gathers(group_, "gathering gradients of");
  int next = 0;  // to gather
  for (int i = 0; i < states_.num_units(); ++i) {
    if (!runs[i].empty()) {
      for (; gathers_gradients() && next < states_.num_units() && (next <= i || gathers.has_room()); ++next) {
        const OwnRow own = copies || !are_elementwise(runs[next]) ? OwnRow::copied : OwnRow::left;
        if (!runs[next].empty()) start_gathering(next, reducer, gathers, own);
      }
      if (gathers_gradients() && !copies && are_elementwise(runs[i])) {
        step_own_first(pass_of(i, {}, Side::both), reducer.gradient(i), runs[i], gathers);
        publish(i, publication);
        continue;
      }
      gradients::UnitGradient gradient = gathers_gradients() ? gathers.wait_first()
                                         : copies            ? reducer.gradient(i)
                                                             : reducer.gradient_on_device(i);
      if (copies && gathers_gradients()) {
        announce(i, sum_on_device(gradient), *copies);
        pass_over(i, gradient, Side::device);
      }
      pass_over(i, gradient, copies ? Side::host : Side::both);
      if (!norms && !leaves_for_files(i)) send_parameters(i);
      if (copies) copies->join();
      if (gathers_gradients()) pool_.put(std::move(gradient.rows.rows[0]));
    }
    if (!norms && !leaves_for_files(i)) publish(i, publication);
  }
  if (!norms) publish_through_files(runs, publication);
  if (norms) step_by_norms(*norms, runs, gradient_scale, groups, copies ? &*copies : nullptr, publication);
}

/// The second pass of a rule of norms.
void ShardedOptimizer::step_by_norms(ParameterNorms& norms, const std::vector<std::vector<Run>>& runs,
                                     double gradient_scale, const std::vector<Hyperparameters>& groups,
                                     HostExchange::Step* copies, Publication& publication) {
  norms.settle();
  if (policy_.shard_optimizer && group_.size() > 1) norms.exchange(group_, device_);
  const auto& norm_rule = dynamic_cast<const NormRule&>(rule());
  std::vector<std::vector<double>> ratios(runs.size());
  for (int i = 0; i < states_.num_units(); ++i) {
    for (const Run& run : runs[i]) {
      const std::span<double> numbers = states_.numbers(i, run.parameter);
      ratios[i].push_back(norm_rule.next_ratio(norms.whole(i, run.parameter), groups.at(run.group), numbers));
    }
  }
  const auto pass_over = [&](int unit, Side side) {
    apply_ratios({unit, {}, gradient_scale, groups, nullptr, copies, side}, runs[unit], ratios[unit]);
  };
  if (copies) each_moving(runs, [&](int unit) { pass_over(unit, Side::device); });
  for (int i = 0; i < states_.num_units(); ++i) {
    pass_over(i, copies ? Side::host : Side::both);
    if (!runs[i].empty() && !leaves_for_files(i)) send_parameters(i);
    if (copies) copies->join();
    if (!leaves_for_files(i)) publish(i, publication);
  }
  publish_through_files(runs, publication);
}

/// Whether what a device steps of the unit passes to files.
bool ShardedOptimizer::leaves_for_files(int unit) const {
  const Buffer& shard = units_[unit]->shard();
  return states_.parts(unit).front().leaves && shard.resident_bytes() < shard.nbytes();
}

/// Once all work of the device is issued: here the host waits.
void ShardedOptimizer::publish_through_files(const std::vector<std::vector<Run>>& runs, Publication& publication) {
  for (int i = 0; i < states_.num_units(); ++i) {
    if (!leaves_for_files(i)) continue;
    if (!runs[i].empty()) send_parameters(i);
    publish(i, publication);
  }
}

/// Those that the device has stepped go to where they lie.
void ShardedOptimizer::send_parameters(int unit) {
  const StatePart& part = states_.parts(unit).front();
  if (part.leaves) out_->send(part.master.in_place(), states_.parameters(unit), part.begin);
}

/// Announced in the order of the host's steps.
void ShardedOptimizer::announce(int unit, const Tensor& gradient, HostExchange::Step& copies) const {
  const StatePart* part = states_.part_on_host(unit);
  if (part) copies.announce(unit, gradient.narrow(0, part->begin, part->numel()));
}

/// The sums hold the scaled gradients afterwards; they are dropped after a step.
void ShardedOptimizer::step_by_caller(const gradients::Reducer& reducer, double gradient_scale,
                                      const std::vector<Hyperparameters>& groups, const ActiveParameters& active,
                                      Publication& publication) {
  std::vector<Tensor> gradients, for_caller;
  UnitGathers gathers(group_, "gathering gradients of");
  for (int i = 0; i < states_.num_units(); ++i) {
    states_.changing(i);
    states_.refresh_masters(i);
    const bool moves = !states_.count_step(i, active, groups).empty();
    Tensor gradient;
    if (moves && !gathers_gradients()) gradient = reducer.gradient(i).sum_where_stepped();
    if (moves && gathers_gradients()) {
      start_gathering(i, reducer, gathers);
      gradient = gathers.wait_first();
    }
    if (moves && gradient_scale != 1.0) gradient.mul_(gradient_scale);
    for_caller.push_back(gradient.defined() ? custom_->beside_master(i, gradient) : gradient);
    gradients.push_back(std::move(gradient));
  }
  custom_->step(for_caller, groups, active);
  for (int i = 0; i < states_.num_units(); ++i) {
    narrow_master(i);
    if (gathers_gradients() && gradients[i].defined()) pool_.put(std::move(gradients[i]));
    publish(i, publication);
  }
}

/// Parameters follow from masters that are memory of their own.
void ShardedOptimizer::narrow_master(int unit) {
  if (states_.packed(unit)) return;
  for (const StatePart& part : states_.parts(unit)) {
    if (part.aliased) continue;
    if (part.leaves && part.master.tier() == tiers::Tier::device) {
      send_parameters(unit);
      continue;
    }
    const Buffer parameters = states_.parameters(unit, part);
    const Buffer* const both[] = {&part.master, &parameters};
    for_each_block(both, {0, part.numel()}, [&](Block block) {
      const auto master = part.master.lease(block, Access::read);
      parameters.lease(block, Access::write).tensor().copy_(master.tensor());
    });
  }
}

void ShardedOptimizer::start_gathering(int unit, const gradients::Reducer& reducer, UnitGathers& gathers,
                                       OwnRow own_row) {
  const std::string& name = units_[unit]->layout().name;
  Tensor whole = pool_.take(units_[unit]->numel(), at::kFloat), own = reducer.gradient(unit).sum();
  if (!reducer.is_mostly_zero(unit))
    return gathers.start(name, std::move(whole), std::move(own), own_row, &teams_.of(units_[unit]->shard_over()));
  comm::all_gather_coded(group_, comm::NonzeroCodec(), whole, own, pool_,
                         {"step", "gathering gradients of unit '" + name + "'"});
  gathers.add_done(std::move(whole));
}

/// The elements of [begin, end) of the unit whose states this rank has, counted from the states' beginning.
Block ShardedOptimizer::own_part(int unit, int64_t begin, int64_t end) const {
  const int64_t first = std::max(begin, states_.begin(unit));
  const int64_t count = std::min(end, states_.end(unit)) - first;
  return {first - states_.begin(unit), std::max<int64_t>(count, 0)};
}

/// Visits segments of `range`, block by block, wherever the states lie: what is resident is one block.
void ShardedOptimizer::each_segment(const UnitPass& pass, const Run& run, Block range, SegmentAccess access,
                                    const Visit& visit) {
  if (access.master != Access::read || access.states != Access::read) states_.changing(pass.unit);
  for (const StatePart& part : states_.parts(pass.unit)) {
    const bool is_passed = pass.side != Side::both && part.on_host != (pass.side == Side::host);
    const Block own = part.within(range);
    if (!is_passed && own.count > 0) each_segment(pass, run, part, own, access, visit);
  }
}

/// `range`: of the part. What lies beside the parameters begins where they do, so its blocks are theirs.
void ShardedOptimizer::each_segment(const UnitPass& pass, const Run& run, const StatePart& part, Block range,
                                    SegmentAccess access, const Visit& visit) {
  const Hyperparameters& hyper = pass.groups.at(run.group);
  const PackedMaster* packed = access.takes_packed ? states_.packed(pass.unit) : nullptr;
  const Buffer& master = packed ? packed->low : part.master;
  const size_t num_roles = rule().roles().size();
  // A pass that leaves the masters alone leaves the parameters alone.
  const bool narrows = !part.aliased && !part.leaves && !states_.packed(pass.unit) && access.master != Access::read;
  const bool returns = narrows && part.on_host && states_.parameters(pass.unit).tier() == tiers::Tier::device;
  const Buffer parameters = (narrows && !returns) || packed ? states_.parameters(pass.unit, part) : Buffer();
  // A master of the parameters' type, in memory of its own.
  const bool repeats = !packed && parameters.defined() && parameters.dtype() == master.dtype();
  std::vector<const Buffer*> buffers{&master, &parameters, &pass.gradient.sums};
  for (size_t role = 0; role < num_roles; ++role) {
    if (rule().keeps(role, hyper)) buffers.push_back(&part.states[role]);
  }
  const auto visit_block = [&](Block block) {
    const Block of_unit{part.begin + block.begin, block.count};
    const auto lease = master.lease(block, access.master);
    std::vector<tiers::Lease> leases(num_roles);
    Segment segment{.master = lease.tensor(),
                    .states = std::vector<Tensor>(num_roles),
                    .gradient = {},
                    .param = {},
                    .first = of_unit.begin,
                    .rounding = states_.rounding(pass.unit, of_unit.begin)};
    for (size_t role = 0; role < num_roles; ++role) {
      if (!rule().keeps(role, hyper)) continue;
      leases[role] = part.states[role].lease(block, access.states);
      segment.states[role] = leases[role].tensor();
    }
    prefetch_after(pass, part, block);
    tiers::Lease narrowed, summed;
    if (pass.gradient.defined()) {
      const Block of_gradient{block.begin - pass.gradient_begin, block.count};
      segment.gradient = !part.on_host           ? pass.gradient.part(of_gradient, summed)
                         : pass.gradient.on_host ? pass.gradient.on_host->read(block)
                                                 : pass.copies->gradient(pass.unit, block);
    }
    if (parameters.defined()) narrowed = parameters.lease(block, packed ? access.master : Access::write);
    segment.param = narrowed.tensor();
    if (packed) {
      segment.low = std::exchange(segment.master, std::exchange(segment.param, Tensor()));
      segment.halfway = packed->halfway.get();
    }
    if (returns) return step_and_return(pass, of_unit, segment, visit);
    if (repeats) segment.param = Tensor();
    visit(of_unit, segment);
    if (repeats) narrowed.tensor().copy_(segment.master);
  };
  const int64_t most = part.on_host ? kHostBlockNumel : INT64_MAX;
  for_each_block(std::span<const Buffer* const>(buffers), range, visit_block, most);
}

/// The host steps the segment of a device's parameters, which follow from it.
void ShardedOptimizer::step_and_return(const UnitPass& pass, Block block, Segment& segment, const Visit& visit) const {
  const Tensor target = part_of(states_.parameters(pass.unit).in_place(), block);
  const Tensor values = pass.copies->parameters(block.count, target.scalar_type());
  const bool narrow = target.scalar_type() != segment.master.scalar_type();
  if (narrow) segment.param = values;
  visit(block, segment);
  if (!narrow) values.copy_(segment.master);  // where the next step may not reach it before it is copied
  pass.copies->send(values, target);
}

/// Announces what the step reads next: the blocks behind `block`, or the first ones of the next unit.
void ShardedOptimizer::prefetch_after(const UnitPass& pass, const StatePart& part, Block block) {
  if (pass.side == Side::device) return;  // what it steps is there
  int unit = pass.unit;
  int64_t next = block.begin + block.count;
  const StatePart* holds_next = &part;
  if (next >= part.numel()) {
    next = 0;
    if (++unit == states_.num_units()) return;
    holds_next = &states_.parts(unit).back();
  }
  const auto announce = [&](const Buffer& buffer) {
    if (buffer.defined() && next < buffer.numel()) buffer.prefetch({next, 1});
  };
  announce(holds_next->master);
  if (pass.reducer) pass.reducer->prefetch(unit, holds_next->begin + next);
  // A block of 16 bits takes as many bytes as one of states, so a step writes it in parts, which keep the rest.
  const bool writes_parts = !holds_next->master.in_place().defined() || pass.copies;
  if (!holds_next->aliased && writes_parts) announce(states_.parameters(unit, *holds_next));
  for (const Buffer& state : holds_next->states) announce(state);
}

/// An elementwise step where each rank steps all: this rank's own shard while the others' sums are on their way.
void ShardedOptimizer::step_own_first(UnitPass pass, gradients::UnitGradient own, const std::vector<Run>& runs,
                                      UnitGathers& gathers) {
  const sharding::Unit& unit = *units_[pass.unit];
  const Block shard{unit.shard_begin(), unit.layout().shard};
  const auto step_part = [&](Block elements) {
    pass.elements = elements;
    for (const Run& run : runs) step_elements(pass, run);
  };
  pass.gradient = std::move(own);
  pass.gradient_begin = shard.begin;
  step_part(shard);
  pass.gradient = gathers.wait_first();
  pass.gradient_begin = 0;
  step_part({0, shard.begin});
  step_part({shard.end(), unit.numel() - shard.end()});
  pool_.put(std::move(pass.gradient.rows.rows[0]));
}

/// All of an elementwise step; of others what precedes the exchange over whole parameters. Matrices are exchanged here,
/// unit by unit; norms once for the model.
void ShardedOptimizer::first_pass(const UnitPass& pass, const std::vector<Run>& runs, ParameterNorms* norms) {
  for (const Run& run : runs) {
    if (run.reach == Reach::elementwise) step_elements(pass, run);
    if (run.reach == Reach::parameter_norms) measure(pass, run, *norms);
  }
  if (reaches(runs, Reach::whole_parameter)) step_matrices(pass, runs);
}

void ShardedOptimizer::step_elements(const UnitPass& pass, const Run& run) {
  const int64_t begin = std::max(run.begin, pass.elements.begin), end = std::min(run.end, pass.elements.end());
  const Block range = begin < end ? own_part(pass.unit, begin, end) : Block();
  const SegmentAccess access{Access::update, Access::update, /*takes_packed=*/true};
  each_segment(pass, run, range, access, [&](Block, const Segment& segment) {
    rule().step(segment, pass.groups.at(run.group), pass.terms(run));
  });
}

/// Moves the states of one parameter and notes its squares, slice by slice.
void ShardedOptimizer::measure(const UnitPass& pass, const Run& run, ParameterNorms& norms) {
  const auto& norm_rule = dynamic_cast<const NormRule&>(rule());
  const int64_t shard = units_[pass.unit]->layout().shard;
  for (int slice = 0; slice < group_.size(); ++slice) {
    const int64_t begin = std::max(run.begin, slice * shard), end = std::min(run.end, (slice + 1) * shard);
    const Block range = begin < end ? own_part(pass.unit, begin, end) : Block();
    if (range.count == 0) continue;
    optim::NormSums& sums = norms.sums(slice, pass.unit, run.parameter, range.count);
    each_segment(pass, run, range, {Access::read, Access::update}, [&](Block block, const Segment& segment) {
      norm_rule.measure(segment, pass.groups.at(run.group), pass.terms(run), block.begin - range.begin, sums);
    });
    if (pass.side == Side::both) norms.settle();  // else the host would wait for the device within its own steps
  }
}

void ShardedOptimizer::apply_ratios(const UnitPass& pass, const std::vector<Run>& runs,
                                    const std::vector<double>& ratios) {
  const auto& norm_rule = dynamic_cast<const NormRule&>(rule());
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    const Hyperparameters& hyper = pass.groups.at(run.group);
    const Block range = own_part(pass.unit, run.begin, run.end);
    each_segment(pass, run, range, {Access::update, Access::read},
                 [&](Block, const Segment& segment) { norm_rule.apply(segment, hyper, pass.terms(run), ratios[i]); });
  }
}

/// Ranks that step all of a unit have the new values already.
void ShardedOptimizer::publish(int unit, Publication& publication) const {
  if (policy_.shard_optimizer) publication.add(*units_[unit]);
}

void ShardedOptimizer::publish_all(const comm::TeamGroups& over) {
  std::vector<int> all(units_.size());
  std::iota(all.begin(), all.end(), 0);
  publish_masters(all, over);
  if (signs_) signs_->reset();
  for (sharding::Unit* unit : units_) {
    for (sharding::Parameter& p : unit->parameters()) unit->count_write(p);
  }
}

/// A graph that saved another parameter of the unit stays valid: only this one counts as written.
void ShardedOptimizer::publish_parameter(int unit, int parameter, const comm::TeamGroups& over) {
  publish_masters({unit}, over);
  units_[unit]->count_write(units_[unit]->parameters()[parameter]);
}

void ShardedOptimizer::publish_masters(const std::vector<int>& units, const comm::TeamGroups& over) {
  at::NoGradGuard no_grad;
  Publication publication(over);
  for (const int i : units) {
    narrow_master(i);
    publication.add(*units_[i]);
  }
  publication.finish();
}

}  // namespace deeptide::zero
