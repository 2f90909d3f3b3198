// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Finds this rank and rank 0's host from tables of the launchers' variables.
#include "world/discovery.h"

#include <limits.h>
#include <netdb.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <vector>

#include "base/json.h"
#include "base/slurm_lists.h"

namespace deeptide::world {
namespace {

using Text = std::optional<std::string>;
using Names = std::vector<const char*>;

constexpr int kMaxWorld = 1 << 20;
constexpr int kMaxLocal = 1 << 16;

enum class Kind : uint8_t { by_hand, mpi, slurm, sagemaker, kubernetes };

/// A launcher and its variables. The first variable in a list that is set counts.
struct Source {
  const char* name;
  Kind kind;
  Names needed = {};  // the launcher is present if all of these are set
  Names rank = {}, size = {}, local_rank = {}, local_size = {};
  Names node_rank = {}, num_nodes = {};
  Names job = {};    // distinguishes the launcher's jobs
  const char* cure;  // how the user states where rank 0 is
};

const Source kSources[] = {
    {.name = "environment",
     .kind = Kind::by_hand,
     .needed = {"RANK"},
     .rank = {"RANK"},
     .size = {"WORLD_SIZE"},
     .local_rank = {"LOCAL_RANK"},
     .local_size = {"LOCAL_WORLD_SIZE", "LOCAL_SIZE"},
     .cure = "start with `deeptide` or `torchrun`, or set MASTER_ADDR and MASTER_PORT"},
    {.name = "openmpi",
     .kind = Kind::mpi,
     .needed = {"OMPI_COMM_WORLD_RANK"},
     .rank = {"OMPI_COMM_WORLD_RANK"},
     .size = {"OMPI_COMM_WORLD_SIZE"},
     .local_rank = {"OMPI_COMM_WORLD_LOCAL_RANK"},
     .local_size = {"OMPI_COMM_WORLD_LOCAL_SIZE"},
     .job = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"},
     .cure = "start with `mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<port>`"},
    {.name = "mvapich",
     .kind = Kind::mpi,
     .needed = {"MV2_COMM_WORLD_RANK"},
     .rank = {"MV2_COMM_WORLD_RANK"},
     .size = {"MV2_COMM_WORLD_SIZE"},
     .local_rank = {"MV2_COMM_WORLD_LOCAL_RANK"},
     .local_size = {"MV2_COMM_WORLD_LOCAL_SIZE"},
     .cure = "start with `mpirun -env MASTER_ADDR <host of rank 0> -env MASTER_PORT <port>`"},
    {.name = "mpich",
     .kind = Kind::mpi,
     .needed = {"PMI_RANK"},
     .rank = {"PMI_RANK"},
     .size = {"PMI_SIZE"},
     .local_rank = {"MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"},
     .local_size = {"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"},
     .job = {"PMI_JOBID", "PALS_APID"},
     .cure = "start with `mpiexec -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT <port>`"},
    // Without a step (a batch script) these describe the allocation, not a process of the job.
    {.name = "slurm",
     .kind = Kind::slurm,
     .needed = {"SLURM_STEP_ID", "SLURM_PROCID"},
     .rank = {"SLURM_PROCID", "PMIX_RANK"},
     .size = {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
     .local_rank = {"SLURM_LOCALID"},
     .node_rank = {"SLURM_NODEID"},
     .num_nodes = {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"},
     .job = {"SLURM_JOB_ID"},
     .cure = "set MASTER_ADDR to the first host of the job"},
    {.name = "sagemaker",
     .kind = Kind::sagemaker,
     .needed = {"SM_HOSTS", "SM_CURRENT_HOST"},
     .job = {"SM_TRAINING_JOB_NAME", "TRAINING_JOB_NAME"},
     .cure = "set MASTER_ADDR and MASTER_PORT"},
    {.name = "kubernetes",
     .kind = Kind::kubernetes,
     .needed = {"JOB_COMPLETION_INDEX"},
     .rank = {"JOB_COMPLETION_INDEX"},
     .size = {"WORLD_SIZE", "JOB_COMPLETIONS"},
     .cure =
         "set MASTER_ADDR to the host name of the pod with index 0, and WORLD_SIZE to the job's number of completions"},
};

struct Variable {
  std::string name, value;
};

/// The report of one source. A rank of -1 or a size of 0 is unknown.
struct Claim {
  const Source* source;
  std::string name;
  int rank = 0, size = 0, local_rank = -1, local_size = 0, node_rank = -1, num_nodes = 0;
  std::string text;  // "openmpi: OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4"
};

std::optional<Variable> first_set(const Environment& environment, const Names& names) {
  for (const char* name : names) {
    if (const Text value = environment.variable(name)) return Variable{name, *value};
  }
  return std::nullopt;
}

int number(const Variable& variable, int low, int high) {
  const std::string& text = variable.value;
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    throw ConfigError("environment variable " + variable.name + "=" + text + ": expected a number from " +
                      std::to_string(low) + " to " + std::to_string(high));
  }
  return value;
}

std::string joined(const Names& names, const char* between) {
  std::string text;
  for (const char* name : names) text += (text.empty() ? "" : between) + std::string(name);
  return text;
}

bool is_set(const Environment& environment, const char* name) { return environment.variable(name).has_value(); }

// The list has one entry per node; SLURM_NODEID is this node's index.
int slurm_local_size(const Environment& environment) {
  const Text counts = environment.variable("SLURM_STEP_TASKS_PER_NODE");
  const Text node = environment.variable("SLURM_NODEID");
  return counts ? tasks_of_node(*counts, node ? std::atoi(node->c_str()) : 0) : 0;
}

std::vector<std::string> sagemaker_hosts(const std::string& text) {
  const JsonValue list = parse_json(text, "SM_HOSTS");
  std::vector<std::string> hosts;
  for (const JsonValue& item : list.items) hosts.push_back(item.string);
  if (hosts.empty() || hosts.front().empty()) {
    throw ConfigError("environment variable SM_HOSTS=" + text + ": expected a list of host names");
  }
  return hosts;
}

/// SageMaker starts one process per host.
Claim claim_of_sagemaker(const Source& source, const Environment& environment) {
  const std::string list = *environment.variable("SM_HOSTS"), own = *environment.variable("SM_CURRENT_HOST");
  const auto hosts = sagemaker_hosts(list);
  const auto place = std::find(hosts.begin(), hosts.end(), own);
  if (place == hosts.end()) {
    throw ConfigError("environment variable SM_CURRENT_HOST=" + own + ": expected one of SM_HOSTS=" + list);
  }
  return {.source = &source,
          .name = source.name,
          .rank = static_cast<int>(place - hosts.begin()),
          .size = static_cast<int>(hosts.size()),
          .local_rank = 0,
          .local_size = 1,
          .text = std::string(source.name) + ": SM_CURRENT_HOST=" + own + ", SM_HOSTS=" + list};
}

std::string precise_name(const Source& source, const Environment& environment) {
  if (source.kind != Kind::by_hand) return source.name;
  if (is_set(environment, "TORCHELASTIC_RUN_ID")) return "torchrun";
  return is_set(environment, "DEEPTIDE_JOB_ID") || is_set(environment, "DEEPTIDE_JOB_TOKEN") ? "deeptide" : source.name;
}

Claim claim_of(const Source& source, const Environment& environment) {
  if (source.kind == Kind::sagemaker) return claim_of_sagemaker(source, environment);
  const auto rank = first_set(environment, source.rank), size = first_set(environment, source.size);
  if (!size) {
    throw ConfigError("the environment describes only part of a world: " + rank->name + "=" + rank->value +
                      " is set; missing: " + joined(source.size, " or ") + ". Set it, or unset " + rank->name +
                      " for a world of one; launchers such as `deeptide` and `torchrun` set both.");
  }
  Claim claim{.source = &source, .name = precise_name(source, environment)};
  claim.size = number(*size, 1, kMaxWorld);
  claim.rank = number(*rank, 0, claim.size - 1);
  claim.text = claim.name + ": " + rank->name + "=" + rank->value + ", " + size->name + "=" + size->value;
  if (const auto local = first_set(environment, source.local_rank)) {
    claim.local_rank = number(*local, 0, kMaxLocal);
  }
  if (const auto local = first_set(environment, source.local_size)) {
    claim.local_size = number(*local, 1, kMaxWorld);
  }
  if (const auto node = first_set(environment, source.node_rank)) claim.node_rank = number(*node, 0, kMaxWorld);
  if (const auto nodes = first_set(environment, source.num_nodes)) claim.num_nodes = number(*nodes, 1, kMaxWorld);
  if (source.kind == Kind::slurm) claim.local_size = slurm_local_size(environment);
  if (source.kind == Kind::kubernetes) claim.local_size = 1;
  return claim;
}

bool is_present(const Source& source, const Environment& environment) {
  const auto set = [&](const char* name) { return is_set(environment, name); };
  if (!std::all_of(source.needed.begin(), source.needed.end(), set)) return false;
  // A pod needs a size to be a rank. With RANK set, WORLD_SIZE counts processes, not pods.
  return source.kind != Kind::kubernetes || (first_set(environment, source.size) && !set("RANK"));
}

std::vector<Claim> all_claims(const Environment& environment) {
  std::vector<Claim> claims;
  for (const Source& source : kSources) {
    if (is_present(source, environment)) claims.push_back(claim_of(source, environment));
  }
  return claims;
}

/// True if `outer`'s one process per host may be an agent of `inner`: `srun torchrun`, mpirun's daemons under SLURM.
bool gives_way(const Claim& outer, const Claim& inner) {
  const bool launched_within = inner.source->kind == Kind::mpi || inner.name == "torchrun" || inner.name == "deeptide";
  return outer.local_size == 1 && (inner.size > outer.size || (launched_within && inner.size == outer.size));
}

/// Returns the innermost source. Each other source must agree with it or have started its agents. Sources that agree
/// fill in its missing values: `srun --mpi=pmi2` sets PMI's variables without a local rank.
Claim agreed(const std::vector<Claim>& claims) {
  Claim inner = claims.front();
  for (const Claim& other : claims) {
    if (other.rank == inner.rank && other.size == inner.size) {
      if (inner.local_rank < 0) inner.local_rank = other.local_rank;
      if (inner.local_size == 0) inner.local_size = other.local_size;
      if (inner.node_rank < 0) inner.node_rank = other.node_rank;
      if (inner.num_nodes == 0) inner.num_nodes = other.num_nodes;
    } else if (!gives_way(other, inner)) {
      throw ConfigError("two launchers describe different worlds:\n  " + inner.text + "\n  " + other.text +
                        "\nUnset the variables of the one that does not apply.");
    }
  }
  return inner;
}

void check_lone_size(const Environment& environment, const std::vector<Claim>& claims) {
  const Text text = environment.variable("WORLD_SIZE");
  if (!text || is_set(environment, "RANK")) return;
  const int size = number({"WORLD_SIZE", *text}, 1, kMaxWorld);
  if (claims.empty()) {
    throw ConfigError(
        "the environment describes only part of a world: WORLD_SIZE=" + *text +
        " is set; missing: RANK. Start with `deeptide` or `torchrun`, or unset WORLD_SIZE for a world of one.");
  }
  if (size == claims.front().size) return;
  throw ConfigError("two launchers describe different worlds:\n  environment: WORLD_SIZE=" + *text + "\n  " +
                    claims.front().text + "\nUnset the variables of the one that does not apply.");
}

std::string before_colon(const std::string& text) { return text.substr(0, text.find(':')); }
std::string as_it_is(const std::string& text) { return text; }
std::string first_of_hosts(const std::string& text) { return sagemaker_hosts(text).front(); }

/// Sources of rank 0's address without MASTER_ADDR. The first variable that is set counts.
const struct {
  const char* variable;
  std::string (*host)(const std::string&);
} kAddresses[] = {
    {"AZ_BATCH_MASTER_NODE", &before_colon},
    {"AZ_BATCHAI_MPI_MASTER_NODE", &as_it_is},
    {"SM_HOSTS", &first_of_hosts},
    {"SLURM_STEP_NODELIST", &first_of_node_list},
    {"SLURM_JOB_NODELIST", &first_of_node_list},
    {"SLURM_NODELIST", &first_of_node_list},
};

/// Returns the first pod of an indexed job: "train-0.train.space.svc" for "train-3.train.space.svc".
std::string first_pod(const std::string& host, const std::string& index) {
  const size_t dot = std::min(host.find('.'), host.size());
  const std::string ending = "-" + index;
  if (dot <= ending.size() || host.compare(dot - ending.size(), ending.size(), ending) != 0) return "";
  return host.substr(0, dot - index.size()) + "0" + host.substr(dot);
}

std::string address_of(const Environment& environment, const Claim& claim) {
  if (const Text given = environment.variable("MASTER_ADDR")) return *given;
  // A guess would hide a mistake if RANK and WORLD_SIZE were set by hand.
  if (claim.source->kind == Kind::by_hand || claim.size == 1) return "";
  if (claim.local_size == claim.size) return "127.0.0.1";
  for (const auto& address : kAddresses) {
    if (const Text text = environment.variable(address.variable)) return address.host(*text);
  }
  if (claim.source->kind == Kind::kubernetes)
    return first_pod(environment.host_name(), *environment.variable("JOB_COMPLETION_INDEX"));
  return "";
}

// Stays below the range from which kernels assign ports (32768 on), so that no passing connection holds the port.
int port_of_job(const std::string& job) {
  constexpr uint32_t kFirst = 20'000, kCount = 12'000;
  uint32_t hash = 2166136261u;  // FNV-1a
  for (const char c : job) hash = (hash ^ static_cast<uint8_t>(c)) * 16777619u;
  return static_cast<int>(kFirst + hash % kCount);
}

int port_of(const Environment& environment, const Claim& claim, int default_port) {
  if (const Text given = environment.variable("MASTER_PORT")) return number({"MASTER_PORT", *given}, 1, 65535);
  if (default_port != kDefaultPort) return default_port;
  const auto job = first_set(environment, claim.source->job);
  if (!job) return default_port;
  const Text step = claim.source->kind == Kind::slurm ? environment.variable("SLURM_STEP_ID") : std::nullopt;
  return port_of_job(job->value + "." + step.value_or(""));
}

void check_address(const Environment& environment, const Claim& claim, const std::string& address) {
  const bool by_hand = claim.source->kind == Kind::by_hand;
  if (claim.size == 1 && !by_hand) return;
  std::string missing = address.empty() ? "MASTER_ADDR" : "";
  if (by_hand && !is_set(environment, "MASTER_PORT")) {
    missing += std::string(missing.empty() ? "" : ", ") + "MASTER_PORT";
  }
  if (missing.empty()) return;
  throw ConfigError("rank 0's address cannot be determined from " + claim.text + "; missing: " + missing +
                    ". Cure: " + claim.source->cure + ".");
}

}  // namespace

Environment Environment::of_process() {
  return {[](const std::string& name) -> Text {
            const char* value = std::getenv(name.c_str());
            return value && *value ? Text(value) : std::nullopt;
          },
          [] {
            char name[HOST_NAME_MAX + 1] = {};
            ::gethostname(name, sizeof name - 1);
            addrinfo hints{}, *found = nullptr;
            hints.ai_flags = AI_CANONNAME;
            std::string result = name;
            if (::getaddrinfo(name, nullptr, &hints, &found) == 0) {
              if (found->ai_canonname) result = found->ai_canonname;
              ::freeaddrinfo(found);
            }
            return result;
          }};
}

std::optional<Placement> discover_placement(const Environment& environment, int default_port) {
  const std::vector<Claim> claims = all_claims(environment);
  check_lone_size(environment, claims);
  if (claims.empty()) return std::nullopt;
  const Claim claim = agreed(claims);
  Placement placement{.local_size = claim.local_size, .node_rank = claim.node_rank, .num_nodes = claim.num_nodes};
  Discovery& found = placement.place;
  found.rank = claim.rank;
  found.size = claim.size;
  found.local_rank = std::max(claim.local_rank, 0);
  found.source = claim.name;
  found.address = address_of(environment, claim);
  check_address(environment, claim, found.address);
  found.port = port_of(environment, claim, default_port);
  found.agent_hosts_store = environment.variable("TORCHELASTIC_USE_AGENT_STORE") == Text("True");
  return placement;
}

std::optional<Discovery> discover(const Environment& environment, int default_port) {
  const std::optional<Placement> placement = discover_placement(environment, default_port);
  return placement ? std::optional(placement->place) : std::nullopt;
}

}  // namespace deeptide::world

namespace deeptide {

std::optional<Discovery> discover_world(int default_port) {
  return world::discover(world::Environment::of_process(), default_port);
}

}  // namespace deeptide
