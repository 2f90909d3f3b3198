// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// `deeptide rank`: one rank under mpirun or srun, with the variables that ranks of the launcher's agents have.
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "launch/commands.h"
#include "launch/options.h"
#include "launch/rank_plan.h"
#include "launch/starter.h"
#include "launch/supervisor.h"

namespace deeptide::launch {
namespace {

// The same number under each starter's name: Open MPI's, SLURM's, then PMI's of MPICH and Intel.
int number_of(std::initializer_list<const char*> names, int fallback) {
  for (const char* name : names) {
    const char* value = std::getenv(name);
    // SLURM writes tasks of all hosts as "2(x3)": the first number is this job's, its hosts are alike.
    if (value && *value >= '0' && *value <= '9') return std::atoi(value);
  }
  return fallback;
}

// Hydra (MPICH, Intel) lets the others run on when a process that is no MPI program fails. An abort over the descriptor
// on which it serves PMI ends them, and mpirun passes the code on. Open MPI and srun end the job by themselves.
void abort_job(int code) {
  const int pmi = number_of({"PMI_FD"}, -1);
  if (pmi < 0) return;
  const std::string abort = "cmd=abort exitcode=" + std::to_string(code) + "\n";
  [[maybe_unused]] const ssize_t sent = write(pmi, abort.data(), abort.size());
}

}  // namespace

int run_rank(const Arguments& arguments) {
  auto options = parse_options(arguments);
  if (!options) return 0;
  options->share_terminal = false;  // mpirun gives each rank a terminal of its own
  const int rank = number_of({"OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK", "PMIX_RANK"}, -1);
  if (rank < 0) throw UsageError("'deeptide rank' is started by mpirun or srun: none of their variables is set");
  const int local = number_of({"OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID"}, 0);
  HostPlace place;
  place.world_size = number_of({"OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "PMI_SIZE"}, 1);
  place.num_ranks =
      number_of({"OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE", "MPI_LOCALNRANKS"}, local + 1);
  place.first_rank = rank - local;
  place.num_nodes = (place.world_size + place.num_ranks - 1) / place.num_ranks;
  place.node_rank = number_of({"SLURM_NODEID"}, rank / place.num_ranks);
  const char* address = std::getenv("MASTER_ADDR");
  const char* nodes = std::getenv("SLURM_STEP_NODELIST");
  if (address) place.master_addr = address;
  if (!address && nodes) place.master_addr = first_of_nodelist(nodes);
  place.master_port = number_of({"MASTER_PORT"}, 29500);
  RankPlan plan = plan_ranks(*options, place).at(local);
  const int code = Supervisor(*options).run({plan}, "");
  if (code != 0) abort_job(code);
  return code;
}

}  // namespace deeptide::launch
