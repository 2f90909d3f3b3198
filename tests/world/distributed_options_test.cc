// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Options beside the environment: which of the two counts, and options that do not go together.
#include "world/distributed_options.h"

#include <gtest/gtest.h>

#include <map>

namespace deeptide::world {
namespace {

using std::chrono::milliseconds;
using Variables = std::map<std::string, std::string>;

const Variables kTorchrun{{"RANK", "1"},
                          {"WORLD_SIZE", "4"},
                          {"LOCAL_RANK", "1"},
                          {"MASTER_ADDR", "head"},
                          {"MASTER_PORT", "1234"},
                          {"TORCHELASTIC_RUN_ID", "none"},
                          {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const Variables kMpich{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};

Environment environment_of(const Variables& variables) {
  return {[variables](const std::string& name) -> std::optional<std::string> {
            const auto found = variables.find(name);
            return found == variables.end() ? std::nullopt : std::optional(found->second);
          },
          [] { return "alone"; }};
}

std::optional<Discovery> place_of(const Variables& variables, const DistributedOptions& options) {
  return find_place(environment_of(variables), options);
}

std::string error_of(const Variables& variables, const DistributedOptions& options) {
  try {
    place_of(variables, options);
    timeout_of(environment_of(variables), options);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "none";
}

TEST(DistributedOptions, LeaveDiscoveryAloneByDefault) {
  EXPECT_EQ(place_of({}, {}), std::nullopt);
  const auto place = place_of(kTorchrun, {});
  ASSERT_TRUE(place);
  EXPECT_EQ(place->rank, 1);
  EXPECT_EQ(place->size, 4);
  EXPECT_EQ(place->source, "torchrun");
  EXPECT_TRUE(place->agent_hosts_store);
  EXPECT_EQ(place_of(kMpich, {.distributed_port = 4711})->port, 4711);
}

TEST(DistributedOptions, CountBeforeWhatTheLauncherSays) {
  const auto place = place_of(kMpich, {.distributed_port = 4711, .rank = 2, .world_size = 3});
  EXPECT_EQ(place->rank, 2);
  EXPECT_EQ(place->size, 3);
  EXPECT_EQ(place->source, "arguments");
  EXPECT_EQ(place->address, "127.0.0.1");
  EXPECT_EQ(place->port, 4711);
  const auto under_torchrun = place_of(kTorchrun, {.rank = 0, .world_size = 2});
  EXPECT_EQ(under_torchrun->address, "head");
  EXPECT_EQ(under_torchrun->port, 1234);
  EXPECT_FALSE(under_torchrun->agent_hosts_store) << "torchrun's agent knows nothing of such a world";
}

TEST(DistributedOptions, LeaveMpiAloneWithoutAutoMpiDiscovery) {
  EXPECT_EQ(place_of(kMpich, {.auto_mpi_discovery = false}), std::nullopt);
  EXPECT_EQ(place_of(kTorchrun, {.auto_mpi_discovery = false})->size, 4);
  Variables both = kTorchrun;
  both.insert(kMpich.begin(), kMpich.end());
  EXPECT_NE(error_of(both, {}).find("two launchers describe different worlds"), std::string::npos);
  EXPECT_EQ(place_of(both, {.auto_mpi_discovery = false})->size, 4);
}

TEST(DistributedOptions, MeetWhereInitMethodSays) {
  const auto tcp = place_of(kTorchrun, {.init_method = "tcp://other:99"});
  EXPECT_EQ(tcp->address, "other");
  EXPECT_EQ(tcp->port, 99);
  EXPECT_FALSE(tcp->agent_hosts_store);
  EXPECT_TRUE(place_of(kTorchrun, {.init_method = "tcp://head:1234"})->agent_hosts_store);
  EXPECT_EQ(place_of(kTorchrun, {.init_method = "tcp://[fe80::1]:99"})->address, "fe80::1");
  EXPECT_EQ(place_of(kTorchrun, {.init_method = "env://"})->address, "head");
  EXPECT_EQ(place_of({}, {.init_method = "env://"}), std::nullopt);
  const auto file = place_of({}, {.init_method = "file:///shared/meeting", .rank = 1, .world_size = 2});
  EXPECT_EQ(file->file, "/shared/meeting");
  EXPECT_EQ(file->address, "");
  EXPECT_EQ(place_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}}, {.init_method = "tcp://head:5"})->address, "head")
      << "no MASTER_ADDR is needed then";
}

TEST(DistributedOptions, AreRefusedWhereTheyDoNotGoTogether) {
  EXPECT_EQ(error_of({}, {.rank = 1}), "rank=1, world_size=-1: give both, or neither to let Deeptide discover them");
  EXPECT_EQ(error_of({}, {.world_size = 1}),
            "rank=-1, world_size=1: give both, or neither to let Deeptide discover them");
  EXPECT_EQ(error_of({}, {.rank = 2, .world_size = 2}), "rank=2, world_size=2: expected 0 <= rank < world_size");
  EXPECT_EQ(error_of({}, {.dist_init_required = false}).find("dist_init_required is false"), 0u);
  EXPECT_EQ(error_of({}, {.dist_init_required = true}), "none");
  EXPECT_NE(error_of({}, {.init_method = "tcp://head:5"}).find("no argument or variable gives the rank"),
            std::string::npos);
  for (const char* bad : {"tcp://head", "tcp://:5", "tcp://head:0", "tcp://head:65536", "tcp://head:5?rank=0",
                          "file://", "mpi://x", "head:5"}) {
    EXPECT_EQ(error_of(kTorchrun, {.init_method = bad}),
              "init_method='" + std::string(bad) + "': expected tcp://HOST:PORT, file://PATH or env://");
  }
}

TEST(DistributedOptions, WaitAsLongAsTheySayElseAsDeepSpeedsVariable) {
  EXPECT_EQ(timeout_of(environment_of({}), {}), std::chrono::minutes(10));
  EXPECT_EQ(timeout_of(environment_of({{"DEEPSPEED_TIMEOUT", "3"}}), {}), std::chrono::minutes(3));
  EXPECT_EQ(timeout_of(environment_of({{"DEEPSPEED_TIMEOUT", "3"}}), {.timeout = milliseconds(7)}), milliseconds(7));
  EXPECT_NE(error_of({}, {.timeout = milliseconds(0)}).find("expected more than 0"), std::string::npos);
  for (const char* bad : {"ten", "0", "-1", "1.5", "99999999999999999999"}) {
    EXPECT_EQ(error_of({{"DEEPSPEED_TIMEOUT", bad}}, {}).find("environment variable DEEPSPEED_TIMEOUT="), 0u) << bad;
  }
}

}  // namespace
}  // namespace deeptide::world
