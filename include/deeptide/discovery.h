// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which rank this process is, according to its launcher and its program, before any connection. Needs no torch.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "deeptide/errors.h"

namespace deeptide {

/// Port of rank 0's store if neither MASTER_PORT, nor a job's number, nor the program gives one.
inline constexpr int kDefaultPort = 29500;

/// The facts that a launcher's variables state about this process, before any connection is made.
struct DEEPTIDE_API Discovery {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  std::string address;             // of rank 0's host; empty in a world of one without one
  int port = 0;                    // of rank 0's store
  std::string source;              // "deeptide", "torchrun", "environment", "openmpi", "mpich", "mvapich", "slurm",
                                   // "sagemaker", "kubernetes"
  bool agent_hosts_store = false;  // torchrun's agent listens on the port, not rank 0
  std::string file;                // a file that all ranks see; then address and port are unset
};

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (set by `deeptide`, torchrun, Azure ML, Kubeflow),
/// and the variables of OpenMPI, MPICH, Intel MPI, MVAPICH, SLURM, SageMaker and Kubernetes' indexed jobs. Returns
/// nothing if none is set. `default_port`: used if neither MASTER_PORT nor a job's number gives a port.
/// Errors: ConfigError listing the variables that are missing, malformed, or contradict each other.
DEEPTIDE_API std::optional<Discovery> discover_world(int default_port = kDefaultPort);

/// The facts that a program may state about its world; every field has a default. Names and defaults equal those of
/// Python's init_distributed, and so DeepSpeed's.
struct DEEPTIDE_API DistributedOptions {
  std::string dist_backend;                          // "gloo", or empty for gloo; World::make_backend provides others
  bool auto_mpi_discovery = true;                    // false: read only RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
  int distributed_port = kDefaultPort;               // rank 0's port if nothing else gives one
  bool verbose = true;                               // rank 0 logs, at level debug, which world it found
  std::optional<std::chrono::milliseconds> timeout;  // absent: DEEPSPEED_TIMEOUT minutes, else 10
  std::string init_method;                           // "tcp://HOST:PORT", "file://PATH" or "env://": where all meet
  std::optional<bool> dist_init_required;            // false: an error, since nothing is initialised yet
  std::string config;                                // path of a ds_config.json, to be validated
  int rank = -1;                                     // with world_size, overrides the launcher's
  int world_size = -1;
};

}  // namespace deeptide
