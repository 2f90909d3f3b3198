// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The agents' payloads, in JSON.
#include "launch/agent_job.h"

#include <nlohmann/json.hpp>

namespace deeptide::launch {
namespace {

using nlohmann::json;

// JSON's strings are UTF-8, arguments and variables need not be: each byte travels as the code point of its number.
std::string widen(const std::string& bytes) {
  std::string text;
  for (unsigned char c : bytes) {
    if (c < 0x80) {
      text += static_cast<char>(c);
    } else {
      text += static_cast<char>(0xc0 | c >> 6);
      text += static_cast<char>(0x80 | (c & 0x3f));
    }
  }
  return text;
}

std::string narrow(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c < 0x80 || i + 1 == text.size()) {
      bytes += text[i];
    } else {
      bytes += static_cast<char>((c & 0x03) << 6 | (static_cast<unsigned char>(text[++i]) & 0x3f));
    }
  }
  return bytes;
}

json to_json(const RankOptions& options) {
  json command = json::array();
  for (const std::string& word : options.command) command.push_back(widen(word));
  return {{"module", options.module},
          {"no_python", options.no_python},
          {"pass_local_rank", options.pass_local_rank},
          {"no_local_rank", options.no_local_rank},
          {"bind_cores", options.bind_cores},
          {"bind_core_list", options.bind_core_list},
          {"python", widen(options.python)},
          {"command", command}};
}

RankOptions options_from(const json& from) {
  RankOptions options;
  options.module = from.at("module");
  options.no_python = from.at("no_python");
  options.pass_local_rank = from.at("pass_local_rank");
  options.no_local_rank = from.at("no_local_rank");
  options.bind_cores = from.at("bind_cores");
  options.bind_core_list = from.at("bind_core_list");
  options.python = narrow(from.at("python"));
  for (const json& word : from.at("command")) options.command.push_back(narrow(word));
  if (options.command.empty()) throw std::runtime_error("no command");
  return options;
}

json to_json(const HostPlace& place) {
  json environment = json::object();
  for (const auto& [name, value] : place.environment) environment[name] = widen(value);
  return {{"node_rank", place.node_rank},     {"num_nodes", place.num_nodes},   {"first_rank", place.first_rank},
          {"num_ranks", place.num_ranks},     {"world_size", place.world_size}, {"master_addr", place.master_addr},
          {"master_port", place.master_port}, {"devices", place.devices},       {"environment", environment}};
}

HostPlace place_from(const json& from) {
  HostPlace place;
  place.node_rank = from.at("node_rank");
  place.num_nodes = from.at("num_nodes");
  place.first_rank = from.at("first_rank");
  place.num_ranks = from.at("num_ranks");
  place.world_size = from.at("world_size");
  place.master_addr = from.at("master_addr");
  place.master_port = from.at("master_port");
  place.devices = from.at("devices").get<std::vector<int>>();
  for (const auto& [name, value] : from.at("environment").items()) place.environment[name] = narrow(value);
  return place;
}

}  // namespace

std::string to_text(const AgentJob& job) {
  return json{{"options", to_json(job.options)},
              {"place", to_json(job.place)},
              {"folder", widen(job.folder)},
              {"failure_grace", job.failure_grace_s},
              {"heartbeat_timeout", job.heartbeat_timeout_s}}
      .dump();
}

AgentJob job_from_text(const std::string& text) {
  const json from = json::parse(text);
  AgentJob job;
  job.options = options_from(from.at("options"));
  job.place = place_from(from.at("place"));
  job.folder = narrow(from.at("folder"));
  job.failure_grace_s = from.at("failure_grace");
  job.heartbeat_timeout_s = from.at("heartbeat_timeout");
  return job;
}

std::string to_text(const RankExit& exit) {
  return json{{"code", exit.status.code},
              {"signal", exit.status.signal},
              {"peak_bytes", exit.status.peak_bytes},
              {"out_of_memory", exit.status.out_of_memory},
              {"asked", exit.asked}}
      .dump();
}

RankExit exit_from_text(const std::string& text) {
  const json from = json::parse(text);
  RankExit exit;
  exit.status.code = from.at("code");
  exit.status.signal = from.at("signal");
  exit.status.peak_bytes = from.at("peak_bytes");
  exit.status.out_of_memory = from.at("out_of_memory");
  exit.asked = from.at("asked");
  return exit;
}

}  // namespace deeptide::launch
