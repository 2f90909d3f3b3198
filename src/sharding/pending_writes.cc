// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps written units and copies their slices into the shards.
#include "sharding/pending_writes.h"

#include <algorithm>

namespace deeptide::sharding {

namespace {

void add(std::vector<Parameter*>& parameters, Parameter& p) {
  if (std::find(parameters.begin(), parameters.end(), &p) == parameters.end()) parameters.push_back(&p);
}

}  // namespace

PendingWrites::Entry* PendingWrites::find(const Unit& unit) {
  const auto it = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.unit == &unit; });
  return it == entries_.end() ? nullptr : &*it;
}

bool PendingWrites::has(const Unit& unit) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.unit == &unit; });
}

int64_t PendingWrites::numel() const {
  int64_t numel = 0;
  for (const Entry& entry : entries_) numel += entry.unit->numel();
  return numel;
}

void PendingWrites::begin(Parameter& p) {
  ++operators_;
  Entry* entry = find(*p.unit);
  if (entry == nullptr || entry->claimed.empty() || entry->kept.defined()) return;
  // The other ranks may have answered the claim already: what it meant must not change.
  const Unit& unit = *p.unit;
  const at::Tensor now = unit.whole().narrow(0, unit.shard_begin(), unit.layout().shard);
  entry->kept = device::allocate_flat(ledger_, device::Role::gathered, now.numel(), now.scalar_type(), now.device());
  entry->kept.copy_(now);
}

void PendingWrites::end(Parameter& p, bool succeeded) {
  --operators_;
  if (!succeeded) return;
  Entry* entry = find(*p.unit);
  if (entry == nullptr) entry = &entries_.emplace_back(Entry{p.unit, {}, {}, {}});
  add(entry->later, p);
  ++writes_;
}

int32_t PendingWrites::claim() {
  if (operators_ > 0) return claimed_ = -1;
  for (Entry& entry : entries_) {
    for (Parameter* p : entry.later) add(entry.claimed, *p);
    entry.later.clear();
    entry.kept.reset();
  }
  return claimed_ = writes_;
}

void PendingWrites::commit_claimed() {
  for (Entry& entry : entries_) {
    for (Parameter* p : entry.claimed) entry.unit->write_back(*p, entry.kept);
    entry.claimed.clear();
    entry.kept.reset();
  }
  std::erase_if(entries_, [](const Entry& entry) { return entry.later.empty(); });
  writes_ -= std::max(claimed_, 0);
  claimed_ = 0;
}

void PendingWrites::commit() {
  claim();
  commit_claimed();
  writes_ = 0;
}

}  // namespace deeptide::sharding
