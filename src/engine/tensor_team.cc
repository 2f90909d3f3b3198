// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// One channel between neighbours. Sums are of all ranks' rows in one order, so that all ranks have the same bits.
#include "deeptide/tensor_team.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <mutex>

#include "base/libraries/format.h"
#include "base/log.h"
#include "comm/group.h"
#include "device/lane.h"
#include "engine/design/nearest_divisors.h"
#include "engine/design/topology.h"
#include "host/host.h"
#include "numerics/sums/ordered_sum.h"
#include "world/failure_board.h"

namespace deeptide {

using at::Tensor;
using world::Axis;

namespace {

constexpr std::chrono::milliseconds kBeforeServing{2};
constexpr int64_t kWholeRowsBytes = 64 << 10;  // up to here, each rank sums all rows: one exchange and not two

std::string next_team_name(const World& world) {
  const auto number = world.store->add("deeptide/tensor_teams/" + std::to_string(world.rank), 1);
  return "deeptide/tensor_team/" + std::to_string(number);
}

/// A text that lasts for ever, as the flight log keeps them.
const char* lasting(const std::string& phase) {
  for (const char* known : {"forward", "backward", "checkpoint"}) {
    if (phase == known) return known;
  }
  return "start";
}

bool is_summed_in_fp32(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf; }

/// Rows (W, N) -> (N,).
Tensor sum_of(const Tensor& rows) {
  if (!is_summed_in_fp32(rows.scalar_type())) {
    Tensor sum = rows[0].clone();
    for (int64_t r = 1; r < rows.size(0); ++r) sum.add_(rows[r]);
    return sum;
  }
  Tensor sum = at::empty({rows.size(1)}, rows.options());
  const Tensor squares = at::empty({1}, rows.options().dtype(at::kDouble));
  numerics::ordered_sum(rows.unbind(0), 1.0, /*overwrite=*/true, sum, squares);
  return sum;
}

world::Mesh mesh_of(const World& world, int size, int stages) {
  check_mesh({.pipeline = stages, .tensor = size}, world.size);
  world::Mesh::Sizes sizes{1, 1, 1, 1, 1};
  sizes[static_cast<size_t>(Axis::pipe)] = stages;
  sizes[static_cast<size_t>(Axis::data)] = world.size / stages / size;
  sizes[static_cast<size_t>(Axis::tensor)] = size;
  return {world.size, sizes};
}

}  // namespace

struct TensorTeam::Impl {
  Impl(const World& world, int size, int stages, std::chrono::milliseconds timeout)
      : mesh(mesh_of(world, size, stages)),
        team(comm::Team::along(mesh, world.rank, {Axis::tensor})),
        data(comm::Team::along(mesh, world.rank, {Axis::data})),
        name(next_team_name(world)),
        board(std::make_shared<world::FailureBoard>(world, name + "/board", world::kErrorGrace, mesh)),
        host(host::Host::find(team.within(world), name + "/host", /*enabled=*/true, board, team.ranks())),
        group(world, team, name + "/tensor", {.timeout = timeout, .board = board, .host = host}),
        device_group(world.make_backend
                         ? std::make_unique<comm::Group>(
                               world, team, name + "/device/tensor",
                               comm::ChannelOptions{.timeout = timeout, .board = board, .on_device = true})
                         : nullptr) {
    if (size == 1 || host->holds_all() || world.rank != 0) return;
    log(LogLevel::warning,
        format_text("tensor: ranks {} to {} share layers and not a host or its memory ({}): every "
                    "layer waits for the network; place as many ranks on each host as \"tensor\" says",
                    team.ranks().front(), team.ranks().back(), host->text()));
  }

  /// The channel for a tensor. Errors: ValueError if it lies where the team has none.
  comm::Group& group_for(const Tensor& tensor) {
    if (tensor.is_cpu()) return group;
    TORCH_CHECK_VALUE(device_group, "the team that shares layers was made for the CPU, and got a tensor on ",
                      tensor.device(), ": move the model there before initialize, or give make_team its device");
    return *device_group;
  }

  /// Makes `like`'s device, or this thread, wait.
  void wait(comm::Pending& pending, const Tensor& like, const std::string& phase, const char* what) {
    const comm::Site site{lasting(phase), what};
    if (!like.is_cpu()) return device_group->order_before(device::Lane::current(like.device()), pending, site);
    std::function<void()> serving;
    // Between passes an engine's ranks are of one mind already, and begin no round.
    if (phase == "forward" || phase == "backward") {
      const std::lock_guard lock(mutex);
      serving = meanwhile;
    }
    if (serving && group.wait_for(pending, kBeforeServing, site)) return;
    group.wait(pending, site, serving);
  }

  /// Lives on in the sum that waits for it.
  using Shared = std::shared_ptr<comm::Pending>;

  Sum gathering(const Tensor& own, const std::string& phase, const char* what) {
    Tensor all = at::empty({team.size() * own.numel()}, own.options());
    const Shared pending = std::make_shared<comm::Pending>(group_for(own).all_gather(all, own));
    return Sum([=, this, rows = all.view({team.size(), own.numel()})] {
      wait(*pending, rows, phase, what);
      return rows;
    });
  }

  Tensor gathered(const Tensor& own, const std::string& phase, const char* what) {
    return gathering(own, phase, what).wait();
  }

  Sum summing_whole_rows(const Tensor& own, const std::string& phase, const char* what) {
    return Sum([rows = gathering(own, phase, what)]() mutable { return sum_of(rows.wait()); });
  }

  /// Shapes: sent (W * N,) -> (N,).
  Sum summing_own_rows(const Tensor& sent, const std::string& phase, const char* what) {
    Tensor rows = at::empty_like(sent);
    const Shared pending = std::make_shared<comm::Pending>(group_for(sent).all_to_all(rows, sent));
    return Sum([=, this] {
      wait(*pending, rows, phase, what);
      return sum_of(rows.view({team.size(), -1}));
    });
  }

  /// Each rank sums one slice of all rows. Shapes: own (N,) -> (N,).
  Sum summing_in_slices(const Tensor& own, const std::string& phase, const char* what) {
    const int64_t numel = own.numel(), slice = (numel + team.size() - 1) / team.size();
    Tensor sent = at::zeros({slice * team.size()}, own.options());
    sent.narrow(0, 0, numel).copy_(own);
    return Sum([=, this, part = summing_own_rows(sent, phase, what)]() mutable {
      return gathered(part.wait(), phase, what).view({-1}).narrow(0, 0, numel);
    });
  }

  const world::Mesh mesh;
  const comm::Team team, data;
  const std::string name;
  const std::shared_ptr<world::FailureBoard> board;
  const std::shared_ptr<host::Host> host;
  comm::Group group;
  const std::unique_ptr<comm::Group> device_group;  // null: the world is the CPU's
  std::mutex mutex;
  std::function<void()> meanwhile;
  bool layers_have_own_groups = false;
};

TensorTeam::TensorTeam(const World& world, int size, double timeout_s, int stages)
    : impl_(std::make_unique<Impl>(world, size, stages,
                                   std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000)))) {}
TensorTeam::~TensorTeam() = default;

int TensorTeam::size() const { return impl_->team.size(); }
int TensorTeam::index() const { return impl_->team.index(); }
int TensorTeam::data_rank() const { return impl_->data.index(); }
int TensorTeam::data_size() const { return impl_->data.size(); }

namespace {

Tensor flat_of(const Tensor& tensor) { return tensor.detach().contiguous().view({-1}); }

TensorTeam::Sum shaped(TensorTeam::Sum sum, std::vector<int64_t> shape) {
  return TensorTeam::Sum([sum = std::move(sum), shape = std::move(shape)]() mutable {
    const at::NoGradGuard no_grad;
    return at::_unsafe_view(sum.wait(), shape);  // no view, so that programs may write it
  });
}

}  // namespace

Tensor TensorTeam::all_reduce(const Tensor& tensor, const std::string& phase) {
  return start_all_reduce(tensor, phase).wait();
}

Tensor TensorTeam::reduce_scatter(const Tensor& tensor, const std::string& phase) {
  return start_reduce_scatter(tensor, phase).wait();
}

TensorTeam::Sum TensorTeam::start_all_reduce(const Tensor& tensor, const std::string& phase) {
  constexpr const char* kWhat = "adding up over the ranks that share a layer";
  const at::NoGradGuard no_grad;
  const Tensor own = flat_of(tensor);
  const std::vector<int64_t> shape = tensor.sizes().vec();
  if (size() == 1) return Sum([own, shape] { return at::_unsafe_view(own.clone(), shape); });
  const bool whole = size() == 2 || static_cast<int64_t>(own.nbytes()) <= kWholeRowsBytes;
  Sum sum = whole ? impl_->summing_whole_rows(own, phase, kWhat) : impl_->summing_in_slices(own, phase, kWhat);
  return shaped(std::move(sum), shape);
}

TensorTeam::Sum TensorTeam::start_reduce_scatter(const Tensor& tensor, const std::string& phase) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(tensor.dim() > 0 && tensor.size(0) == size(), "reduce_scatter: got a tensor of shape ",
                    tensor.sizes(), ", expected ", size(), " rows, one for each rank that shares a layer");
  const Tensor own = flat_of(tensor);
  const std::vector<int64_t> shape = tensor.sizes().slice(1).vec();
  if (size() == 1 || own.numel() == 0) return Sum([own, shape] { return at::_unsafe_view(own.clone(), shape); });
  return shaped(impl_->summing_own_rows(own, phase, "adding up a part over the ranks that share a layer"), shape);
}

Tensor TensorTeam::all_gather(const Tensor& tensor, const std::string& phase) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.insert(shape.begin(), size());
  return at::_unsafe_view(impl_->gathered(flat_of(tensor), phase, "gathering from the ranks that share a layer"),
                          shape);
}

void TensorTeam::broadcast(const Tensor& tensor, const std::string& phase) {
  const at::NoGradGuard no_grad;
  auto pending = impl_->group_for(tensor).broadcast(flat_of(tensor), 0);
  impl_->wait(pending, tensor, phase, "taking the first rank's values of a layer that is cut");
}

void TensorTeam::note_own_groups() { impl_->layers_have_own_groups = true; }
bool TensorTeam::layers_have_own_groups() const { return impl_->layers_have_own_groups; }

void TensorTeam::serve(std::function<void()> meanwhile, std::shared_ptr<trace::Recorder> recorder) {
  const std::lock_guard lock(impl_->mutex);
  impl_->meanwhile = std::move(meanwhile);
  impl_->group.report_to(recorder);
  if (impl_->device_group) impl_->device_group->report_to(std::move(recorder));
}

void check_mesh(const MeshSizes& sizes, int ranks) {
  const int rest = ranks / std::max(1, sizes.pipeline);
  const std::string mesh = format_text("the mesh pipeline={} tensor={}{} over {} ranks is impossible: ", sizes.pipeline,
                                       sizes.tensor, sizes.data ? format_text(" data={}", *sizes.data) : "", ranks);
  if (sizes.pipeline < 1 || ranks % sizes.pipeline != 0) {
    throw ConfigError(mesh + format_text("{} ranks do not divide into {} stages; take parallel.pipeline {}", ranks,
                                         sizes.pipeline, engine::nearest_divisors(sizes.pipeline, ranks)));
  }
  if (sizes.tensor < 1 || rest % sizes.tensor != 0) {
    throw ConfigError(mesh + format_text("{} ranks{} do not divide into teams of {}; take parallel.tensor {}", rest,
                                         sizes.pipeline > 1 ? " of each stage" : "", sizes.tensor,
                                         engine::nearest_divisors(sizes.tensor, rest)));
  }
  const int left = rest / sizes.tensor;
  if (!sizes.data || *sizes.data == left) return;
  throw ConfigError(mesh + format_text("{} ranks are left for data; take parallel.data {}, or \"auto\"", left, left));
}

std::shared_ptr<const engine::Axes> tensor_axes(const MeshSizes& sizes, int ranks, std::vector<TensorSlice> slices,
                                                const std::vector<std::string>& adding,
                                                std::shared_ptr<TensorTeam> team) {
  check_mesh(sizes, ranks);
  engine::Axes axes;
  axes.sizes[static_cast<size_t>(Axis::pipe)] = sizes.pipeline;
  axes.sizes[static_cast<size_t>(Axis::tensor)] = sizes.tensor;
  axes.sizes[static_cast<size_t>(Axis::data)] = ranks / sizes.pipeline / sizes.tensor;
  const std::vector<Axis> all{Axis::data, Axis::tensor};
  if (!slices.empty()) {
    engine::Tenancy cut{.prefix = "", .shard_over = {Axis::data}, .reduce_over = {Axis::data}};
    for (const TensorSlice& slice : slices) cut.names.insert(slice.name);
    axes.tenancies.push_back(std::move(cut));
  }
  if (!adding.empty()) {
    axes.tenancies.push_back({.prefix = "",
                              .shard_over = all,
                              .reduce_over = all,
                              .names = {adding.begin(), adding.end()},
                              .adds_up = true});
  }
  axes.slices = std::move(slices);
  axes.tensor_team = std::move(team);
  return std::make_shared<const engine::Axes>(std::move(axes));
}

}  // namespace deeptide
