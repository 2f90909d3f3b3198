// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Two channels over one rank of each stage. Gloo moves letters beside what their ranks compute; memory that a host
// shares would need the sender's hands.
#include "engine/bind/stages.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/libraries/format.h"
#include "deeptide/errors.h"

namespace deeptide::engine {
namespace {

/// Begins each exchange. It has one size: stages whose programs differ read of each other, where messages of different
/// sizes would break the connection.
struct Opening {
  std::array<char, 24> phase{};
  std::array<char, 96> what{};
  uint64_t bytes = 0;
  std::array<char, 256> content{};  // all of it, where it fits
};

template <size_t N>
void put(std::array<char, N>& to, const std::string& text) {
  std::memcpy(to.data(), text.data(), std::min(text.size(), N - 1));
}

bool is_same(const Opening& one, const Opening& other) {
  return one.phase == other.phase && one.what == other.what && one.bytes == other.bytes;
}

std::string text_of(const Opening& opening) { return format_text("{}, {}", opening.phase.data(), opening.what.data()); }

}  // namespace

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

void Stages::exchange_bytes(const void* own, void* all, size_t bytes, const comm::Site& site) {
  Opening opening;
  put(opening.phase, site.phase);
  put(opening.what, site.what);
  opening.bytes = bytes;
  const bool fits = bytes <= opening.content.size();
  if (fits && bytes > 0) std::memcpy(opening.content.data(), own, bytes);
  const std::vector<Opening> openings = votes_.exchange(opening, site);
  for (size_t stage = 0; stage < openings.size(); ++stage) {
    if (is_same(openings[stage], opening)) continue;
    throw CommError(format_text(
        "stage {} of {} stopped at {}: stage {} has come to {} instead. All stages call the engine's methods in one "
        "order: a program that catches an error and goes on does so on all stages",
        index(), size(), text_of(opening), stage, text_of(openings[stage])));
  }
  if (!fits) return votes_.exchange_bytes(own, all, bytes, site);
  for (size_t stage = 0; bytes > 0 && stage < openings.size(); ++stage) {
    std::memcpy(static_cast<char*>(all) + stage * bytes, openings[stage].content.data(), bytes);
  }
}

}  // namespace deeptide::engine
