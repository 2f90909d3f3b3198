// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Who trains together: this process's rank, how many there are, and the store where they meet.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "deeptide/errors.h"

namespace deeptide {

/// A rank's place in the world. Value type; cheap to copy.
struct DEEPTIDE_API World {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  c10::intrusive_ptr<c10d::Store> store;  // shared by all ranks; an in-process one for a world of one
  /// Makes the backend (NCCL) that carries device tensors on one channel among `ranks`; empty: Gloo, from `store`.
  using BackendFactory =
      std::function<c10::intrusive_ptr<c10d::Backend>(const std::vector<int>& ranks, const std::string& channel)>;
  BackendFactory make_backend;
  std::string host;    // name of its machine; empty: found out (boot, network, user)
  std::string source;  // how it was found: a Discovery's source, "single" or "threads"
};

/// What a launcher's variables say of this process, before any connection is made.
struct DEEPTIDE_API Discovery {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  std::string address;             // of rank 0's host; empty in a world of one without one
  int port = 0;                    // of rank 0's store
  std::string source;              // "deeptide", "torchrun", "environment", "openmpi", "mpich", "mvapich", "slurm",
                                   // "sagemaker", "kubernetes"
  bool agent_hosts_store = false;  // torchrun's agent listens on the port, not rank 0
  std::string file;                // a file that all ranks see; then there is neither address nor port
};

inline constexpr int kDefaultPort = 29500;

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (set by `deeptide`, torchrun, Azure ML, Kubeflow),
/// the variables of OpenMPI, MPICH, Intel MPI, MVAPICH, SLURM, SageMaker and of Kubernetes' indexed jobs. Nothing when
/// none is set. `default_port`: used when neither MASTER_PORT nor a job's number gives one.
/// Errors: ConfigError listing the variables that are missing, malformed, or contradict each other.
DEEPTIDE_API std::optional<Discovery> discover_world(int default_port = kDefaultPort);

/// What a program may say of its world; all of it may stay as it is. Names and defaults are those of Python's
/// init_distributed, and so DeepSpeed's.
struct DEEPTIDE_API DistributedOptions {
  std::string dist_backend;             // "gloo", or empty for the same; others are handed over in World::make_backend
  bool auto_mpi_discovery = true;       // false: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT alone are read
  int distributed_port = kDefaultPort;  // where rank 0 listens when nothing else says
  bool verbose = true;                  // rank 0 logs, at level debug, which world it found
  std::optional<std::chrono::milliseconds> timeout;  // absent: DEEPSPEED_TIMEOUT minutes, else 10
  std::string init_method;                           // "tcp://HOST:PORT", "file://PATH" or "env://": where all meet
  std::optional<bool> dist_init_required;            // false: an error, since nothing is initialised yet
  std::string config;                                // path of a ds_config.json, to be validated
  int rank = -1;                                     // with world_size, instead of what the launcher says
  int world_size = -1;
};

/// Finds the world with discover_world(), where `options` do not say it, and meets the other ranks at rank 0's store;
/// without a launcher, a world of one. Every rank proves that it holds DEEPTIDE_JOB_TOKEN where that is set; see
/// docs/diagnosis.md.
/// Errors: as discover_world(); ConfigError for options that do not go together, and when ranks disagree on the world
/// or two claim one rank; CommError when rank 0's store cannot be reached within the timeout or a token is wrong.
DEEPTIDE_API World init_distributed(const DistributedOptions& options = {});

/// The same for a place that is known already.
DEEPTIDE_API World join_world(const Discovery& place, std::chrono::milliseconds timeout = std::chrono::seconds(300));

/// Ranks as threads of one process (tests, notebooks): the store is shared, e.g. a c10d::HashStore. Ranks of different
/// `host` names take each other for ranks on other machines.
DEEPTIDE_API World make_world(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const std::string& host = "");

}  // namespace deeptide
