// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Maps first: whether a host can is known on all its ranks afterwards.
#include "engine/bind/settle.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "base/log.h"

namespace deeptide::engine {

namespace {

/// Collective over a host: memory for all parameters and for gradient buckets. Null on all its ranks if one cannot.
std::shared_ptr<host::Arena> share_parameters(const Design& design, host::Host& host) {
  int64_t parameters = 0, numel = 0;
  for (const UnitRow& row : design.units) {
    parameters += host::Arena::padded(row.layout.numel * static_cast<int64_t>(c10::elementSize(row.layout.dtype)));
    numel += row.layout.numel;
  }
  std::string why_not;
  auto arena = host::Arena::create(host, parameters, host::Arena::heap_of_buckets(numel), why_not);
  if (!arena && host.index() == 0) log(LogLevel::warning, "ranks of one host do not share parameters: " + why_not);
  return arena;
}

/// Collective. Memory for the buckets of so many elements that the ranks of each host share; null on all ranks if one
/// of them has none.
std::shared_ptr<host::Arena> share_buckets(Channels& channels, int64_t numel) {
  std::string why_not;
  auto arena =
      host::Arena::create(*channels.host(), /*parameter_bytes=*/0, host::Arena::heap_of_buckets(numel), why_not);
  const auto own = at::full({1}, arena ? 1 : 0, at::kByte), all = at::empty({channels.control().size()}, at::kByte);
  auto pending = channels.control().all_gather(all, own);
  channels.control().wait(pending, {"start", "telling which hosts share memory"});
  if (all.all().item<bool>()) return arena;
  if (!why_not.empty() && channels.host()->index() == 0) {
    log(LogLevel::warning, "ranks of one host do not sum their gradients before they travel: " + why_not);
  }
  return nullptr;
}

}  // namespace

Settled settle(ModelFacts facts, const Config& config, const InitOptions& options, Channels& channels) {
  Settled settled{design(std::move(facts), config, options, channels.topology()), nullptr};
  const Design& design = settled.design;
  if (!design.is_shared && design.reductions.together == 1) return settled;
  settled.arena =
      design.is_shared ? share_parameters(design, *channels.host()) : share_buckets(channels, design.num_elements());
  if (settled.arena) return settled;
  Topology apart = channels.topology();
  apart.can_share = false;
  settled.design = engine::design(design, config, apart);
  return settled;
}

}  // namespace deeptide::engine
