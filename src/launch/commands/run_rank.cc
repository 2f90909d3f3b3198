// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs `deeptide rank`: one rank under mpirun or srun, with the same variables as ranks of the launcher's agents.
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

// True for a rank of srun itself, false for one of a daemon that mpirun started through srun within an allocation.
// With --mpi=pmi2, srun sets PMI's variables too, except MPI_LOCALRANKID.
bool is_under_srun() {
  return std::getenv("SLURM_PROCID") && !std::getenv("OMPI_COMM_WORLD_RANK") && !std::getenv("MPI_LOCALRANKID");
}

// Returns the variables of mpirun or srun, without those that describe a surrounding job of `deeptide` or torchrun, or
// a daemon of mpirun under SLURM.
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
  throw UsageError("'deeptide rank' must be started by mpirun or srun, but none of their variables is set");
}

HostPlace host_place(const world::Placement& own) {
  HostPlace place;
  place.first_rank = own.place.rank - own.place.local_rank;
  place.world_size = own.place.size;
  place.num_ranks = std::max(own.local_size, own.place.local_rank + 1);
  place.num_nodes = own.num_nodes > 0
                        ? own.num_nodes
                        : (place.world_size + place.num_ranks - 1) / place.num_ranks;  // assumes equal hosts
  place.node_rank = own.node_rank >= 0 ? own.node_rank : own.place.rank / place.num_ranks;
  if (!own.place.address.empty()) place.master_addr = own.place.address;
  place.master_port = own.place.port;
  return place;
}

// When a process fails that is not an MPI program, Hydra (MPICH, Intel) lets the others continue. An abort over the
// descriptor of Hydra's PMI ends them, and mpirun returns the code. Open MPI and srun end the job themselves.
void abort_job(int code) {
  const char* descriptor = std::getenv("PMI_FD");
  if (!descriptor || *descriptor < '0' || *descriptor > '9') return;
  std::this_thread::sleep_for(kWordsUnderWay);
  const std::string abort = "cmd=abort exitcode=" + std::to_string(code) + "\n";
  [[maybe_unused]] const ssize_t sent = write(std::atoi(descriptor), abort.data(), abort.size());
}

// srun returns the largest exit code of all ranks and Hydra the bitwise or, so a rank that ended on request must not
// hide the cause. It must not end the others early (--kill-on-bad-exit) either: ^C arrives as SIGINT, and the launcher
// knows of it. SIGTERM from srun may mean that the job was cancelled, which is not a success.
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

// A rank started by hand under mpirun has no launcher. Hides the variable from programs that the rank starts.
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
  options->share_terminal = false;  // mpirun gives each rank its own terminal
  options->under_starter = true;
  const world::Placement own = own_placement();
  const HostPlace place = host_place(own);
  const RankPlan plan = plan_ranks(*options, place).at(own.place.local_rank);
  // The starter may kill its process or process group; the rank's descendants end even then.
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
