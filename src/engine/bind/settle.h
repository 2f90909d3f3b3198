// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// A design and the memory of a host that it asks for, settled with each other.
#pragma once

#include <memory>

#include "engine/bind/channels.h"
#include "engine/design/design.h"
#include "host/arena.h"

namespace deeptide::engine {

struct Settled {
  Design design;
  /// For parameters that the ranks of a host share, or for buckets that they sum before they travel. Null: for neither.
  std::shared_ptr<host::Arena> arena;
};

/// Collective. Designs what `facts` describe, and designs it anew without shared memory where a host has none.
/// Errors: as `design`.
Settled settle(ModelFacts facts, const Config& config, const InitOptions& options, Channels& channels);

}  // namespace deeptide::engine
