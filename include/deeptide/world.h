// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The ranks that train together: this process's rank, their number, and the store where they meet.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "deeptide/discovery.h"
#include "deeptide/errors.h"

namespace deeptide {

/// A rank's place in the world. Value type; cheap to copy.
struct DEEPTIDE_API World {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  c10::intrusive_ptr<c10d::Store> store;  // shared by all ranks; in-process for a world of one
  /// Makes the backend (NCCL) that carries device tensors on one channel among `ranks`; empty: Gloo, from `store`.
  using BackendFactory =
      std::function<c10::intrusive_ptr<c10d::Backend>(const std::vector<int>& ranks, const std::string& channel)>;
  BackendFactory make_backend;
  std::string host;    // name of the machine; empty: derived (boot, network, user)
  std::string source;  // how it was found: a Discovery's source, "single" or "threads"
};

/// Finds the world with discover_world(), as far as `options` leave it open, and meets the other ranks at rank 0's
/// store; without a launcher, a world of one. If DEEPTIDE_JOB_TOKEN is set, every rank proves that it holds the token;
/// see docs/diagnosis.md.
/// Errors: as discover_world(); ConfigError for options that conflict, and if ranks disagree on the world or two claim
/// one rank; CommError if rank 0's store cannot be reached within the timeout or a token is wrong.
DEEPTIDE_API World init_distributed(const DistributedOptions& options = {});

/// Joins the world at a known place, as init_distributed() does.
DEEPTIDE_API World join_world(const Discovery& place, std::chrono::milliseconds timeout = std::chrono::seconds(300));

/// Makes ranks as threads of one process (tests, notebooks): the store is shared, e.g. a c10d::HashStore. Ranks of
/// different `host` names treat each other as on other machines.
DEEPTIDE_API World make_world(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const std::string& host = "");

}  // namespace deeptide
