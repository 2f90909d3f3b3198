// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Exchanges offsets through a ring of small slots.
#include "host/exchange.h"

#include <cstring>
#include <thread>

#include "base/invariant.h"

namespace deeptide::host {

using at::Tensor;
using std::chrono::milliseconds;

namespace {

struct Span {
  int64_t offset;
  int64_t bytes;
};

class AllOffered : public Operation {
 public:
  AllOffered(std::shared_ptr<Ring> ring, uint32_t number) : ring_(std::move(ring)), number_(number) {}
  bool ready() override { return ring_->all_posted(number_); }
  bool advance(milliseconds limit) override { return ring_->wait_posted(number_, limit); }

 private:
  std::shared_ptr<Ring> ring_;
  uint32_t number_;
};

}  // namespace

Exchange::Exchange(const std::shared_ptr<Host>& host, std::shared_ptr<Arena> arena)
    : arena_(std::move(arena)), ring_(std::make_shared<Ring>(host, kMaxOffers, sizeof(Span))) {}

Exchange::Offer Exchange::offer(const Tensor& flat) {
  char* slot = ring_->next_slot();
  TORCH_CHECK(slot != nullptr, "deeptide: ", kMaxOffers,
              " reductions are under way: another rank is far behind this one");
  const Span span{arena_->offset_of(flat), static_cast<int64_t>(flat.nbytes())};
  std::memcpy(slot, &span, sizeof(span));
  const uint32_t number = ring_->post();
  return {std::make_shared<AllOffered>(ring_, number), number};
}

std::vector<Tensor> Exchange::rows(uint32_t number, int64_t begin, int64_t numel, at::ScalarType dtype) const {
  std::vector<Tensor> rows;
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  for (int peer = 0; peer < ring_->size(); ++peer) {
    Span span{};
    std::memcpy(&span, ring_->slot(peer, number), sizeof(span));
    DEEPTIDE_INVARIANT((begin + numel) * item <= span.bytes, "rank of index ", peer, " offered ", span.bytes,
                       " bytes, ", (begin + numel) * item, " are needed");
    rows.push_back(arena_->at(span.offset + begin * item, numel, dtype));
  }
  return rows;
}

bool Exchange::wait_read(uint32_t number, milliseconds limit) {
  try {
    return ring_->wait_read(number, limit);
  } catch (const TransportError&) {  // a later wait reports it
    std::this_thread::sleep_for(limit);
    return false;
  }
}

}  // namespace deeptide::host
