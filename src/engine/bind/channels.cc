// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Counts channel names per store, so that engines of one process do not mix.
#include "engine/bind/channels.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "comm/device_read.h"
#include "engine/design/choices.h"

namespace deeptide::engine {
namespace {

/// Returns a name equal on all ranks: all ranks make their engines in one order, counted per store.
std::string next_channel_name(const World& world, const char* kind) {
  const std::string key = std::string("deeptide/engines/") + kind + "/" + std::to_string(world.rank);
  return std::to_string(world.store->add(key, 1)) + "/" + kind;
}

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

std::map<std::string, TensorSlice> slices_of(const Axes* axes) {
  std::map<std::string, TensorSlice> slices;
  if (axes == nullptr) return slices;
  for (const TensorSlice& slice : axes->slices) slices.emplace(slice.name, slice);
  return slices;
}

/// World ranks of the team on this host.
std::vector<int> ranks_of(const host::Host& host, const comm::Team& team) {
  std::vector<int> ranks;
  for (const int index : host.ranks()) ranks.push_back(team.ranks()[static_cast<size_t>(index)]);
  return ranks;
}

}  // namespace

Channels::Channels(const std::optional<World>& world, const Config& config, const Axes* axes)
    : world_(world ? *world : init_distributed()),
      timeout_(milliseconds_of(config.runtime().comm_timeout_s)),
      topology_{.mesh = axes ? axes->mesh_of(world_.size) : world::Mesh::data_parallel(world_.size),
                .rank = world_.rank,
                .tenancies = axes ? axes->tenancies : std::vector<Tenancy>(),
                .slices = slices_of(axes)},
      data_(topology_.data()),
      clock_(std::make_shared<comm::Clock>()),
      recorder_(std::make_shared<trace::Recorder>()),
      board_(std::make_shared<world::FailureBoard>(world_, "deeptide/board/" + next_channel_name(world_, "board"),
                                                   milliseconds_of(config.runtime().error_grace_s), mesh())),
      host_(host::Host::find(data_.within(world_), "deeptide/host/" + next_channel_name(world_, "host"),
                             may_share_memory(config), board_, data_.ranks())),
      between_hosts_(config.runtime().shared_memory && !host_->holds_all()),
      links_(between_hosts_ ? std::make_shared<comm::LinkTimes>(ranks_of(*host_, data_)) : nullptr),
      control_(world_, data_, next_channel_name(world_, "control"), options(/*on_device=*/false)),
      rounds_(control_),
      gathers_(world_, data_, next_channel_name(world_, "gathers"), options(/*on_device=*/true)),
      reductions_(world_, data_, next_channel_name(world_, "reductions"), options(/*on_device=*/true)) {
  topology_.on_host = host_->size();
  topology_.uniform = host_->is_uniform();
  topology_.in_order = host_->is_in_order();
  trace::flight_log().mesh(mesh().sizes());
  if (axes) tensor_team_ = axes->tensor_team;
  if (mesh().size(world::Axis::pipe) == 1) return;
  stages_ = std::make_unique<Stages>(world_, mesh(), next_channel_name(world_, "stages"),
                                     next_channel_name(world_, "letters"), options(/*on_device=*/false));
}

void Channels::open(const std::vector<ChannelRow>& rows) {
  for (const ChannelRow& row : rows) {
    if (all(row.purpose).has(row.team)) continue;
    comm::ChannelOptions own = options(/*on_device=*/true);
    own.host = nullptr;  // it is the data team's: parts of it exchange by c10d
    const char* const name = row.purpose == Purpose::gathers ? "gathers" : "reductions";
    of_parts_[static_cast<int>(row.purpose)].push_back(
        std::make_unique<comm::Group>(world_, row.team, next_channel_name(world_, name), std::move(own)));
  }
}

std::unique_ptr<comm::Group> Channels::open_letters() {
  return std::make_unique<comm::Group>(world_, comm::Team::whole(world_), next_channel_name(world_, "letters"),
                                       on_network(options(/*on_device=*/false), comm::PeerTraffic::yes));
}

void Channels::connect(at::Device device) {
  if (device.is_cpu()) return;
  const comm::Site site{"start", "connecting the ranks' devices"};
  const auto meet = [&](comm::Group& group) {
    if (group.size() == 1) return;
    const auto options = at::TensorOptions().dtype(at::kByte).device(device);
    const at::Tensor own = at::zeros({1}, options), row = at::zeros({group.size()}, options);
    const at::Tensor rows = at::empty_like(row);
    for (const bool gathers : {true, false}) {  // between other pairs of ranks, which NCCL connects one by one
      auto pending = gathers ? group.all_gather(rows, own) : group.all_to_all(rows, row);
      group.wait(pending, site);
      comm::read_on_host(group, rows, site);
    }
  };
  meet(gathers_);
  meet(reductions_);
  for (const auto& groups : of_parts_) {
    for (const auto& group : groups) meet(*group);
  }
}

comm::TeamGroups Channels::all(Purpose purpose) {
  comm::TeamGroups groups(purpose == Purpose::gathers ? gathers_ : reductions_);
  for (const auto& group : of_parts_[static_cast<int>(purpose)]) groups.add(*group);
  return groups;
}

comm::ChannelOptions Channels::options(bool on_device) const {
  return {.timeout = timeout_,
          .board = board_,
          .host = host_,
          .clock = clock_,
          .on_device = on_device,
          .recorder = recorder_,
          .links = on_device ? links_ : nullptr};  // what waits for the other ranks' small messages is no link
}

}  // namespace deeptide::engine
