// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Offsets in a ring of small slots.
#include "comm/host_exchange.h"

#include <cstring>

namespace deeptide::comm {

using at::Tensor;
using std::chrono::milliseconds;

namespace {

struct Place {
  int64_t offset;
  int64_t bytes;
};

class AllOffered : public Operation {
 public:
  AllOffered(std::shared_ptr<HostRing> ring, uint32_t number) : ring_(std::move(ring)), number_(number) {}
  bool ready() override { return ring_->all_posted(number_); }
  bool advance(milliseconds limit) override { return ring_->wait_posted(number_, limit); }

 private:
  std::shared_ptr<HostRing> ring_;
  uint32_t number_;
};

}  // namespace

HostExchange::HostExchange(const std::shared_ptr<Host>& host, std::shared_ptr<HostArena> arena)
    : arena_(std::move(arena)), ring_(std::make_shared<HostRing>(host, kMaxOffers, sizeof(Place))) {}

HostExchange::Offer HostExchange::offer(const Tensor& flat) {
  char* slot = ring_->next_slot();
  TORCH_CHECK(slot != nullptr, "deeptide: ", kMaxOffers,
              " reductions are under way: another rank is far behind this one");
  const Place place{arena_->offset_of(flat), static_cast<int64_t>(flat.nbytes())};
  std::memcpy(slot, &place, sizeof(place));
  const uint32_t number = ring_->post();
  return {Pending(std::make_shared<AllOffered>(ring_, number)), number};
}

std::vector<Tensor> HostExchange::rows(uint32_t number, int64_t begin, int64_t numel, at::ScalarType dtype) const {
  std::vector<Tensor> rows;
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  for (int peer = 0; peer < ring_->size(); ++peer) {
    Place place{};
    std::memcpy(&place, ring_->slot(peer, number), sizeof(place));
    TORCH_INTERNAL_ASSERT((begin + numel) * item <= place.bytes, "rank of index ", peer, " offered ", place.bytes,
                          " bytes, ", (begin + numel) * item, " are needed");
    rows.push_back(arena_->at(place.offset + begin * item, numel, dtype));
  }
  return rows;
}

}  // namespace deeptide::comm
