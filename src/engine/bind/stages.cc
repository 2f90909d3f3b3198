// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Two channels over one rank of each stage. Gloo moves letters beside what their ranks compute; memory that a host
// shares would need the sender's hands.
#include "engine/bind/stages.h"

#include <utility>

namespace deeptide::engine {

comm::ChannelOptions on_network(comm::ChannelOptions options, comm::PeerTraffic peers) {
  options.host = nullptr;
  options.links = nullptr;
  options.on_device = false;
  options.peers = peers;
  return options;
}

Stages::Stages(const World& world, const world::Mesh& mesh, const std::string& control, const std::string& letters,
               const comm::ChannelOptions& options)
    : team_(comm::Team::along(mesh, world.rank, {world::Axis::pipe})),
      control_(world, team_, control, on_network(options, comm::PeerTraffic::no)),
      votes_(control_),
      peers_(world, team_, letters, on_network(options, comm::PeerTraffic::yes)),
      mail_(peers_, at::kCPU) {}

int64_t Stages::expect(const at::Tensor& tensor, int from) {
  letters_.emplace(++last_, mail_.receive_known(tensor, from));
  return last_;
}

at::Tensor Stages::take(int64_t letter, const comm::Site& site, const std::function<void()>& meanwhile) {
  auto found = letters_.extract(letter);
  TORCH_CHECK_VALUE(!found.empty(), "no letter ", letter, " is due: each is taken once");
  return mail_.wait(std::move(found.mapped()), site, meanwhile);
}

}  // namespace deeptide::engine
