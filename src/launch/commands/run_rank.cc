// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// `deeptide rank`: one rank under mpirun or srun, with the variables that ranks of the launcher's agents have.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "deeptide/discovery.h"
#include "launch/commands/commands.h"
#include "launch/job/supervisor.h"
#include "launch/plan/options.h"
#include "launch/plan/rank_plan.h"
#include "launch/process/keeper.h"
#include "launch/system/usage_error.h"
#include "launch/wire/rank_hub.h"
#include "world/discovery.h"

namespace deeptide::launch {
namespace {

constexpr std::chrono::milliseconds kWordsUnderWay{200};  // Hydra reads no output after an abort

// srun itself, not a daemon that mpirun started through srun within an allocation. With --mpi=pmi2 srun sets PMI's
// variables too, except for these.
bool is_under_srun() {
  return std::getenv("SLURM_PROCID") && !std::getenv("OMPI_COMM_WORLD_RANK") && !std::getenv("MPI_LOCALRANKID");
}

// The variables of mpirun or srun, without those that describe a surrounding job of `deeptide` or torchrun, or a daemon
// of mpirun under SLURM.
world::Environment starters_environment() {
  world::Environment process = world::Environment::of_process();
  return {.variable = [process, srun = is_under_srun()](const std::string& name) -> std::optional<std::string> {
            static constexpr std::string_view kByHand[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                                           "LOCAL_SIZE"};
            const bool by_hand = std::find(std::begin(kByHand), std::end(kByHand), name) != std::end(kByHand);
            const bool of_daemon = !srun && name == "SLURM_PROCID";
            return by_hand || of_daemon ? std::nullopt : process.variable(name);
          },
          .host_name = process.host_name};
}

world::Placement own_placement() {
  std::optional<world::Placement> found;
  try {
    found = world::discover_placement(starters_environment(), kDefaultPort);
  } catch (const ConfigError& error) {
    throw UsageError(error.what());
  }
  constexpr std::string_view kStarters[] = {"openmpi", "mvapich", "mpich", "slurm"};
  if (found && std::find(std::begin(kStarters), std::end(kStarters), found->place.source) != std::end(kStarters)) {
    return *found;
  }
  throw UsageError("'deeptide rank' is started by mpirun or srun: none of their variables is set");
}

HostPlace host_place(const world::Placement& own) {
  HostPlace place;
  place.first_rank = own.place.rank - own.place.local_rank;
  place.world_size = own.place.size;
  place.num_ranks = std::max(own.local_size, own.place.local_rank + 1);
  place.num_nodes = own.num_nodes > 0 ? own.num_nodes
                                      : (place.world_size + place.num_ranks - 1) / place.num_ranks;  // hosts are alike
  place.node_rank = own.node_rank >= 0 ? own.node_rank : own.place.rank / place.num_ranks;
  if (!own.place.address.empty()) place.master_addr = own.place.address;
  place.master_port = own.place.port;
  return place;
}

// Hydra (MPICH, Intel) lets the others run on when a process that is no MPI program fails. An abort over the descriptor
// on which it serves PMI ends them, and mpirun passes the code on. Open MPI and srun end the job by themselves.
void abort_job(int code) {
  const char* descriptor = std::getenv("PMI_FD");
  if (!descriptor || *descriptor < '0' || *descriptor > '9') return;
  std::this_thread::sleep_for(kWordsUnderWay);
  const std::string abort = "cmd=abort exitcode=" + std::to_string(code) + "\n";
  [[maybe_unused]] const ssize_t sent = write(std::atoi(descriptor), abort.data(), abort.size());
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

// Started by hand under mpirun, a rank has no launcher to report to. Programs that the rank starts are no ranks.
void report_to_launcher(Supervisor& supervisor, const HostPlace& place, int rank) {
  const char* hub = std::getenv(kHubVariable);
  const char* token = std::getenv("DEEPTIDE_JOB_TOKEN");
  if (!hub || !token || !*token) return;
  const RankHello hello{DEEPTIDE_VERSION, rank, place.world_size, place.node_rank, own_host()};
  supervisor.report_to(hub, token, encode(hello));
  unsetenv(kHubVariable);
}

}  // namespace

int run_rank(const Arguments& arguments) {
  auto options = parse_options(arguments);
  if (!options) return 0;
  options->share_terminal = false;  // mpirun gives each rank a terminal of its own
  options->under_starter = true;
  const world::Placement own = own_placement();
  const HostPlace place = host_place(own);
  const RankPlan plan = plan_ranks(*options, place).at(own.place.local_rank);
  // The starter may kill what it started, by process or by group: the descendants of the rank end even then.
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
