// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Each launcher's variables, alone and together, whole, in part and malformed.
#include "world/discovery.h"

#include <gtest/gtest.h>

#include <map>

namespace deeptide::world {
namespace {

using Variables = std::map<std::string, std::string>;

Environment environment_of(const Variables& variables, const std::string& host = "alone") {
  return {[variables](const std::string& name) -> std::optional<std::string> {
            const auto found = variables.find(name);
            if (found == variables.end() || found->second.empty()) return std::nullopt;
            return found->second;
          },
          [host] { return host; }};
}

std::optional<Discovery> found(const Variables& variables, const std::string& host = "alone") {
  return discover(environment_of(variables, host), kDefaultPort);
}

std::string error_of(const Variables& variables) {
  try {
    found(variables);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "none";
}

void expect_in(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
}

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

const Variables kAddress{{"MASTER_ADDR", "head"}, {"MASTER_PORT", "1234"}};
const Variables kByHand = with(kAddress, {{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}});
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "5"},       {"OMPI_COMM_WORLD_SIZE", "8"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "8"},
                         {"PMIX_NAMESPACE", "34734081"},      {"PMIX_RANK", "5"}};
const Variables kMpich{{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "8"}};
const Variables kMvapich{{"MV2_COMM_WORLD_RANK", "5"},
                         {"MV2_COMM_WORLD_SIZE", "8"},
                         {"MV2_COMM_WORLD_LOCAL_RANK", "1"},
                         {"MV2_COMM_WORLD_LOCAL_SIZE", "8"}};
const Variables kSlurm{{"SLURM_JOB_ID", "77"},
                       {"SLURM_STEP_ID", "0"},
                       {"SLURM_PROCID", "5"},
                       {"SLURM_STEP_NUM_TASKS", "8"},
                       {"SLURM_NTASKS", "16"},
                       {"SLURM_LOCALID", "1"},
                       {"SLURM_NODEID", "1"},
                       {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"},
                       {"SLURM_STEP_NODELIST", "n[03-04]"},
                       {"SLURM_JOB_NODELIST", "n[01-04]"}};

struct Known {
  const char* source;
  Variables variables;
  const char* address;
};

class Launcher : public testing::TestWithParam<Known> {};

TEST_P(Launcher, TellsRankSizeLocalRankAndAddress) {
  const auto place = found(GetParam().variables);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->source, GetParam().source);
  EXPECT_EQ(place->rank, 5);
  EXPECT_EQ(place->size, 8);
  EXPECT_EQ(place->local_rank, 1);
  EXPECT_EQ(place->address, GetParam().address);
  EXPECT_GE(place->port, 1024);
}

TEST_P(Launcher, PrefersTheAddressThatIsGiven) {
  const auto place = found(with(GetParam().variables, kAddress));
  ASSERT_TRUE(place);
  EXPECT_EQ(place->address, "head");
  EXPECT_EQ(place->port, 1234);
}

TEST_P(Launcher, MayAgreeWithWhatIsSetByHand) {
  const auto place = found(with(GetParam().variables, kByHand));
  ASSERT_TRUE(place);
  EXPECT_EQ(place->rank, 5);
  EXPECT_EQ(place->size, 8);
}

INSTANTIATE_TEST_SUITE_P(Each, Launcher,
                         testing::Values(Known{"environment", kByHand, "head"},
                                         Known{"torchrun", with(kByHand, {{"TORCHELASTIC_RUN_ID", "x"}}), "head"},
                                         Known{"deeptide", with(kByHand, {{"DEEPTIDE_JOB_TOKEN", "x"}}), "head"},
                                         Known{"openmpi", kOpenMpi, "127.0.0.1"}, Known{"mpich", kMpich, "127.0.0.1"},
                                         Known{"mvapich", kMvapich, "127.0.0.1"}, Known{"slurm", kSlurm, "n03"},
                                         Known{"openmpi",
                                               with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                                               {"AZUREML_EXPERIMENT_ID", "x"},
                                                               {"AZ_BATCH_MASTER_NODE", "10.0.0.4:6000"}}),
                                               "10.0.0.4"},
                                         Known{"openmpi",
                                               with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                                                               {"SM_HOSTS", "[\"algo-1\", \"algo-2\"]"},
                                                               {"SM_CURRENT_HOST", "algo-2"}}),
                                               "algo-1"}),
                         [](const auto& info) { return std::string(info.param.source) + std::to_string(info.index); });

TEST(Discovery, FindsNothingWhereNoLauncherLeftATrace) {
  EXPECT_FALSE(found({}));
  EXPECT_FALSE(found(kAddress)) << "an address alone describes no rank";
  EXPECT_FALSE(found({{"LOCAL_RANK", "0"}}));
  EXPECT_FALSE(found(without(kSlurm, "SLURM_STEP_ID"))) << "a batch script is no rank";
  EXPECT_FALSE(found({{"JOB_COMPLETION_INDEX", "1"}})) << "a pod of a job of unrelated pods";
}

TEST(Discovery, TakesARankOfAnIndexedJobWithItsFirstPodsName) {
  const Variables pod{{"JOB_COMPLETION_INDEX", "13"}, {"WORLD_SIZE", "20"}};
  const auto place = found(pod, "train-13.train.space.svc.cluster.local");
  ASSERT_TRUE(place);
  EXPECT_EQ(place->source, "kubernetes");
  EXPECT_EQ(place->rank, 13);
  EXPECT_EQ(place->size, 20);
  EXPECT_EQ(place->address, "train-0.train.space.svc.cluster.local");
  EXPECT_EQ(place->port, kDefaultPort);
  expect_in(error_of(pod), {"MASTER_ADDR", "index 0"});  // the host's name is not the pod's
  EXPECT_EQ(found({{"JOB_COMPLETION_INDEX", "2"}, {"JOB_COMPLETIONS", "3"}}, "a-2")->address, "a-0");
}

TEST(Discovery, CountsProcessesAndNotPodsInsideAnIndexedJob) {
  const auto place = found(with(kByHand, {{"JOB_COMPLETION_INDEX", "1"}}));
  ASSERT_TRUE(place);
  EXPECT_EQ(place->rank, 5);
}

TEST(Discovery, TakesSageMakersHostsAsRanksWhereNothingElseStartedThem) {
  const Variables host{{"SM_HOSTS", "[\"algo-1\",\"algo-2\"]"}, {"SM_CURRENT_HOST", "algo-2"}};
  const auto place = found(host);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->source, "sagemaker");
  EXPECT_EQ(place->rank, 1);
  EXPECT_EQ(place->size, 2);
  EXPECT_EQ(place->address, "algo-1");
  expect_in(error_of(with(host, {{"SM_CURRENT_HOST", "algo-9"}})), {"SM_CURRENT_HOST=algo-9", "algo-2"});
  expect_in(error_of(with(host, {{"SM_HOSTS", "[]"}})), {"SM_HOSTS=[]"});
  EXPECT_NE(error_of(with(host, {{"SM_HOSTS", "algo-1"}})), "none");
}

TEST(Discovery, NeedsNoAddressForARankAlone) {
  const auto place = found({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}});
  ASSERT_TRUE(place);
  EXPECT_EQ(place->size, 1);
  EXPECT_EQ(place->address, "");
}

TEST(Discovery, DerivesThePortFromTheJobsNumber) {
  const auto port = [](const char* job, const char* step) {
    return found(with(kSlurm, {{"SLURM_JOB_ID", job}, {"SLURM_STEP_ID", step}}))->port;
  };
  EXPECT_EQ(port("77", "0"), port("77", "0"));
  EXPECT_NE(port("77", "0"), port("78", "0"));
  EXPECT_NE(port("77", "0"), port("77", "1"));
  for (const char* job : {"1", "123456", "99999999"}) {
    EXPECT_GE(port(job, "0"), 20'000);
    EXPECT_LT(port(job, "0"), 32'000);
  }
  EXPECT_EQ(discover(environment_of(kSlurm), 4321)->port, 4321) << "a port that the caller chose counts";
  EXPECT_EQ(found(kMpich)->port, kDefaultPort) << "MPICH's jobs have no number";
}

TEST(Discovery, ListsBothOfTwoLaunchersThatDisagree) {
  expect_in(error_of(with(kOpenMpi, with(kAddress, {{"RANK", "0"}, {"WORLD_SIZE", "2"}}))),
            {"environment: RANK=0, WORLD_SIZE=2", "openmpi: OMPI_COMM_WORLD_RANK=5, OMPI_COMM_WORLD_SIZE=8", "Unset"});
  expect_in(error_of(with(kOpenMpi, with(kMpich, {{"PMI_RANK", "4"}}))), {"OMPI_COMM_WORLD_RANK=5", "PMI_RANK=4"});
  expect_in(error_of(with(kSlurm, with(kMpich, {{"PMI_SIZE", "6"}}))), {"PMI_SIZE=6", "SLURM_STEP_NUM_TASKS=8"});
  expect_in(error_of(with(kSlurm, with(kByHand, {{"RANK", "4"}}))), {"RANK=4", "SLURM_PROCID=5"});
  expect_in(error_of(with(kOpenMpi, {{"WORLD_SIZE", "4"}})), {"WORLD_SIZE=4", "OMPI_COMM_WORLD_SIZE=8"});
}

TEST(Discovery, TakesTheInnerLauncherWhoseAgentsTheOuterOneStarted) {
  const Variables agent = with(kSlurm, {{"SLURM_PROCID", "1"},
                                        {"SLURM_STEP_NUM_TASKS", "2"},
                                        {"SLURM_LOCALID", "0"},
                                        {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"}});
  for (const Variables& inner : {kByHand, with(kByHand, {{"TORCHELASTIC_RUN_ID", "x"}}), with(kOpenMpi, kAddress)}) {
    const auto place = found(with(agent, inner));
    ASSERT_TRUE(place);
    EXPECT_EQ(place->rank, 5);
    EXPECT_EQ(place->size, 8);
  }
  const Variables small{{"RANK", "0"}, {"WORLD_SIZE", "1"}};
  expect_in(error_of(with(agent, with(small, kAddress))), {"WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=2"});
  const Variables permuted = with(kAddress, {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", "x"}});
  EXPECT_EQ(found(with(agent, permuted))->rank, 0) << "torchrun numbers its agents itself";
  EXPECT_NE(error_of(with(agent, without(permuted, "TORCHELASTIC_RUN_ID"))), "none");
}

TEST(Discovery, TakesTheLocalRankFromSlurmWherePmiHasNone) {
  const auto place = found(with(kSlurm, {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}, {"PMI_JOBID", "77.0"}}));
  ASSERT_TRUE(place);
  EXPECT_EQ(place->source, "mpich");
  EXPECT_EQ(place->local_rank, 1);
  EXPECT_EQ(place->address, "n03");
}

TEST(Discovery, TakesTheAddressFromSlurmForAnMpirunWithinIt) {
  const Variables agent =
      with(kSlurm, {{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"}});
  EXPECT_EQ(found(with(agent, with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}})))->address, "n03");
}

TEST(Discovery, ListsWhatIsMissing) {
  expect_in(error_of(without(kByHand, "WORLD_SIZE")), {"RANK=5", "missing: WORLD_SIZE"});
  expect_in(error_of(without(kByHand, "RANK")), {"WORLD_SIZE=8", "missing: RANK"});
  expect_in(error_of(without(kByHand, "MASTER_PORT")), {"missing: MASTER_PORT", "torchrun"});
  expect_in(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), {"missing: MASTER_ADDR, MASTER_PORT"});
  expect_in(error_of(without(kOpenMpi, "OMPI_COMM_WORLD_SIZE")), {"missing: OMPI_COMM_WORLD_SIZE"});
  expect_in(error_of(without(kMpich, "PMI_SIZE")), {"missing: PMI_SIZE"});
  expect_in(error_of(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}})), {"missing: MASTER_ADDR", "mpirun -x"});
  expect_in(error_of(without(kMpich, "MPI_LOCALNRANKS")), {"missing: MASTER_ADDR", "mpiexec -genv"});
}

TEST(Discovery, NamesAMalformedValueWithItsRange) {
  for (const char* bad : {"-1", "8", "five", "5 ", "0x5", "5.0", "99999999999999999999"}) {
    EXPECT_EQ(error_of(with(kByHand, {{"RANK", bad}})),
              std::string("environment variable RANK=") + bad + ": expected a number from 0 to 7");
  }
  expect_in(error_of(with(kByHand, {{"WORLD_SIZE", "0"}})), {"WORLD_SIZE=0: expected a number from 1 to 1048576"});
  expect_in(error_of(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "x"}})), {"OMPI_COMM_WORLD_RANK=x"});
  expect_in(error_of(with(kByHand, {{"MASTER_PORT", "0"}})), {"MASTER_PORT=0: expected a number from 1 to 65535"});
  expect_in(error_of(with(kByHand, {{"LOCAL_RANK", "-3"}})), {"LOCAL_RANK=-3"});
}

TEST(Discovery, CountsSlurmsTasksOfItsOwnNode) {
  // 3 tasks on the first two nodes, 2 on the third, which holds all of nothing: the address comes from the list.
  const auto place = found(with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "3(x2),2"}, {"SLURM_NODEID", "2"}}));
  EXPECT_EQ(place->address, "n03");
  EXPECT_EQ(found(with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "8"}, {"SLURM_NODEID", "0"}}))->address, "127.0.0.1");
}

std::optional<Placement> placed(const Variables& variables) {
  return discover_placement(environment_of(variables), kDefaultPort);
}

TEST(Placement, CountsTheRanksOfThisHost) {
  EXPECT_EQ(placed(kOpenMpi)->local_size, 8);
  EXPECT_EQ(placed(kMpich)->local_size, 8);
  EXPECT_EQ(placed(kOpenMpi)->node_rank, -1) << "mpirun does not number its hosts";
  EXPECT_EQ(placed(kOpenMpi)->num_nodes, 0);
  EXPECT_FALSE(placed({}).has_value());
}

TEST(Placement, TakesHostsAndTasksFromSlurm) {
  const Variables step = with(kAddress, {{"SLURM_STEP_ID", "0"},
                                         {"SLURM_PROCID", "4"},
                                         {"SLURM_STEP_NUM_TASKS", "5"},
                                         {"SLURM_LOCALID", "0"},
                                         {"SLURM_STEP_TASKS_PER_NODE", "2(x2),1"},
                                         {"SLURM_NODEID", "2"},
                                         {"SLURM_STEP_NUM_NODES", "3"},
                                         {"SLURM_NNODES", "4"}});
  const auto here = placed(step);
  EXPECT_EQ(here->place.rank, 4);
  EXPECT_EQ(here->local_size, 1);
  EXPECT_EQ(here->node_rank, 2);
  EXPECT_EQ(here->num_nodes, 3) << "the step's, not the allocation's";
  // srun --mpi=pmi2 sets PMI's rank and size as well, which say nothing of hosts.
  const auto pmi = placed(with(step, {{"PMI_RANK", "4"}, {"PMI_SIZE", "5"}}));
  EXPECT_EQ(pmi->place.source, "mpich");
  EXPECT_EQ(pmi->local_size, 1);
  EXPECT_EQ(pmi->node_rank, 2);
  EXPECT_EQ(pmi->num_nodes, 3);
}

}  // namespace
}  // namespace deeptide::world
