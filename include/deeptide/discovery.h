// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Which rank this process is, as its launcher and its program say; no connection is made. Needs no torch.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "deeptide/errors.h"

namespace deeptide {

/// Where rank 0's store listens when neither MASTER_PORT, nor a job's number, nor the program says.
inline constexpr int kDefaultPort = 29500;

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

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (set by `deeptide`, torchrun, Azure ML, Kubeflow),
/// the variables of OpenMPI, MPICH, Intel MPI, MVAPICH, SLURM, SageMaker and of Kubernetes' indexed jobs. Returns
/// nothing if none is set. `default_port`: used when neither MASTER_PORT nor a job's number gives one.
/// Errors: ConfigError listing the variables that are missing, malformed, or contradict each other.
DEEPTIDE_API std::optional<Discovery> discover_world(int default_port = kDefaultPort);

/// What a program may say of its world; every field has a default. Names and defaults are those of Python's
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

}  // namespace deeptide
