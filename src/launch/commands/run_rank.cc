// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// `deeptide rank`: one rank under mpirun or srun, with the variables that ranks of the launcher's agents have.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>

#include "base/slurm_lists.h"
#include "launch/commands/commands.h"
#include "launch/job/supervisor.h"
#include "launch/plan/options.h"
#include "launch/plan/rank_plan.h"
#include "launch/process/keeper.h"
#include "launch/system/usage_error.h"
#include "launch/wire/rank_hub.h"

namespace deeptide::launch {
namespace {

constexpr std::chrono::milliseconds kWordsUnderWay{200};  // Hydra reads no output after an abort

// The same number under each starter's name: Open MPI's, PMI's of MPICH and Intel, then SLURM's, which within an
// allocation may be those of a daemon that mpirun started through srun.
int number_of(std::initializer_list<const char*> names, int fallback) {
  for (const char* name : names) {
    const char* value = std::getenv(name);
    if (value && *value >= '0' && *value <= '9') return std::atoi(value);
  }
  return fallback;
}

// srun itself, not mpirun's daemons within an allocation. With --mpi=pmi2 srun sets PMI's variables too, but for these.
bool is_under_srun() {
  return std::getenv("SLURM_PROCID") && !std::getenv("OMPI_COMM_WORLD_RANK") && !std::getenv("MPI_LOCALRANKID");
}

int slurm_tasks_here() {
  const char* counts = std::getenv("SLURM_STEP_TASKS_PER_NODE");
  return counts ? tasks_of_node(counts, number_of({"SLURM_NODEID"}, 0)) : 0;
}

int local_rank() { return number_of({"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"}, 0); }

HostPlace own_place() {
  const int rank = number_of({"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "PMIX_RANK"}, -1);
  if (rank < 0) throw UsageError("'deeptide rank' is started by mpirun or srun: none of their variables is set");
  const int local = local_rank();
  HostPlace place;
  place.first_rank = rank - local;
  place.world_size = number_of({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}, 1);
  place.num_ranks = number_of({"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"}, 0);
  const bool slurm = is_under_srun();
  if (slurm && place.num_ranks == 0) place.num_ranks = slurm_tasks_here();
  place.num_ranks = std::max(place.num_ranks, local + 1);
  place.num_nodes = (place.world_size + place.num_ranks - 1) / place.num_ranks;  // mpirun's hosts are alike
  place.node_rank = rank / place.num_ranks;
  if (slurm) place.num_nodes = number_of({"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}, place.num_nodes);
  if (slurm) place.node_rank = number_of({"SLURM_NODEID"}, place.node_rank);
  const char* address = std::getenv("MASTER_ADDR");
  const char* nodes = std::getenv("SLURM_STEP_NODELIST");
  if (address) place.master_addr = address;
  if (!address && nodes) place.master_addr = first_of_node_list(nodes);
  place.master_port = number_of({"MASTER_PORT"}, 29500);
  return place;
}

// Hydra (MPICH, Intel) lets the others run on when a process that is no MPI program fails. An abort over the descriptor
// on which it serves PMI ends them, and mpirun passes the code on. Open MPI and srun end the job by themselves.
void abort_job(int code) {
  const int pmi = number_of({"PMI_FD"}, -1);
  if (pmi < 0) return;
  std::this_thread::sleep_for(kWordsUnderWay);
  const std::string abort = "cmd=abort exitcode=" + std::to_string(code) + "\n";
  [[maybe_unused]] const ssize_t sent = write(pmi, abort.data(), abort.size());
}

// srun's own code is the largest of all, Hydra's has the bits of all: a rank that only obeyed may not hide the cause.
// Nor may it end the others (--kill-on-bad-exit) while they obey too: ^C of the job comes as SIGINT, and the launcher
// knows of it. SIGTERM of srun may mean that the job was cancelled: that is no success.
int code_for_starter(int code, const std::optional<int>& stop_signal) {
  if (!stop_signal || code != 128 + *stop_signal) return code;
  return is_under_srun() && *stop_signal != SIGINT ? 1 : 0;
}

std::string own_host() {
  const char* node = std::getenv("SLURMD_NODENAME");
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return node && is_under_srun() ? node : name;
}

// By hand under mpirun there is no launcher to report to. What the rank starts is no rank of this job.
void report_to_launcher(Supervisor& supervisor, const HostPlace& place, int rank) {
  const char* hub = std::getenv(kHubVariable);
  const char* token = std::getenv("DEEPTIDE_JOB_TOKEN");
  if (!hub || !token || !*token) return;
  const RankHello hello{DEEPTIDE_VERSION, rank, place.world_size, place.node_rank, own_host()};
  supervisor.report_to(hub, token, to_text(hello));
  unsetenv(kHubVariable);
}

}  // namespace

int run_rank(const Arguments& arguments) {
  auto options = parse_options(arguments);
  if (!options) return 0;
  options->share_terminal = false;  // mpirun gives each rank a terminal of its own
  options->under_starter = true;
  const HostPlace place = own_place();
  const RankPlan plan = plan_ranks(*options, place).at(local_rank());
  // The starter may kill what it started, by process or by group: what the rank started ends even so.
  return run_kept_job(
      [&](pid_t keeper) {
        Supervisor supervisor(*options, keeper);
        report_to_launcher(supervisor, place, plan.rank);
        const int code = code_for_starter(supervisor.run({plan}, ""), supervisor.stop_signal());
        if (code != 0 && !is_under_srun()) abort_job(code);
        return code;
      },
      /*own_group=*/true);
}

}  // namespace deeptide::launch
