// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The agents' payloads, field by field.
#include "launch/wire/agent_job.h"

#include "launch/system/payload.h"

namespace deeptide::launch {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankOptions, module, no_python, pass_local_rank, no_local_rank, bind_cores,
                                   bind_core_list, python, command)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(HostPlace, node_rank, num_nodes, first_rank, num_ranks, world_size, master_addr,
                                   master_port, devices, environment)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(AgentJob, options, place, folder, failure_grace_s, heartbeat_timeout_s,
                                   hang_timeout_s)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ExitStatus, code, signal, peak_bytes, out_of_memory)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankExit, status, asked)

std::string to_text(const AgentJob& job) { return pack(job); }

AgentJob job_from_text(const std::string& text) {
  AgentJob job = unpack<AgentJob>(text);
  if (job.options.command.empty()) throw std::runtime_error("no command");
  return job;
}

std::string to_text(const RankExit& exit) { return pack(exit); }

RankExit exit_from_text(const std::string& text) { return unpack<RankExit>(text); }

}  // namespace deeptide::launch
