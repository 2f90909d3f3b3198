// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Encodes the fields of each payload by name.
#include "launch/wire/messages.h"

#include <optional>
#include <stdexcept>
#include <variant>

#include "launch/system/payload.h"

namespace deeptide::launch {
namespace {

template <typename Value>
nlohmann::json to_value(const Value& value) {
  return value;
}
nlohmann::json to_value(const std::optional<double>& value) { return value ? nlohmann::json(*value) : nullptr; }

template <typename Value>
void read_value(const nlohmann::json& from, Value& value) {
  from.get_to(value);
}
void read_value(const nlohmann::json& from, std::optional<double>& value) {
  value = from.is_null() ? std::nullopt : std::optional(from.get<double>());
}

}  // namespace

void to_json(nlohmann::json& to, const RankOptions& from) {
  to = {{"command", from.command}};
  for (const RankOption& option : rank_options()) {
    std::visit([&](auto member) { to[option.flag] = to_value(from.*member); }, option.member);
  }
}

void from_json(const nlohmann::json& from, RankOptions& to) {
  from.at("command").get_to(to.command);
  for (const RankOption& option : rank_options()) {
    std::visit([&](auto member) { read_value(from.at(option.flag), to.*member); }, option.member);
  }
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(HostPlace, node_rank, num_nodes, first_rank, num_ranks, world_size, master_addr,
                                   master_port, devices, environment)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PortRequest, port, fixed)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PortAnswer, port)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(AgentHello, version, addresses)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(AgentJob, options, place, folder)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ExitStatus, code, signal, peak_bytes, out_of_memory)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankExit, status, asked, place)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Late, waited_s)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankHello, version, rank, world_size, node_rank, host)

void to_json(nlohmann::json& to, const Ending::Request& from) {
  to = {{"signal", from.signal}, {"grace_s", from.grace_s}};
}
void from_json(const nlohmann::json& from, Ending::Request& to) {
  to = {.signal = from.at("signal"), .grace_s = from.at("grace_s")};
}

template <>
std::string encode(const PortRequest& message) {
  return pack(message);
}
template <>
PortRequest decode(const std::string& bytes) {
  return unpack<PortRequest>(bytes);
}

template <>
std::string encode(const PortAnswer& message) {
  return pack(message);
}
template <>
PortAnswer decode(const std::string& bytes) {
  return unpack<PortAnswer>(bytes);
}

template <>
std::string encode(const AgentHello& message) {
  return pack(message);
}
template <>
AgentHello decode(const std::string& bytes) {
  return unpack<AgentHello>(bytes);
}

template <>
std::string encode(const RankExit& message) {
  return pack(message);
}
template <>
RankExit decode(const std::string& bytes) {
  return unpack<RankExit>(bytes);
}

template <>
std::string encode(const Late& message) {
  return pack(message);
}
template <>
Late decode(const std::string& bytes) {
  return unpack<Late>(bytes);
}

template <>
std::string encode(const RankHello& message) {
  return pack(message);
}
template <>
RankHello decode(const std::string& bytes) {
  return unpack<RankHello>(bytes);
}

template <>
std::string encode(const Ending::Request& message) {
  return pack(message);
}
template <>
Ending::Request decode(const std::string& bytes) {
  return unpack<Ending::Request>(bytes);
}

template <>
std::string encode(const AgentJob& message) {
  return pack(message);
}
template <>
AgentJob decode(const std::string& bytes) {
  auto job = unpack<AgentJob>(bytes);
  if (job.options.command.empty()) throw std::runtime_error("no command");
  return job;
}

}  // namespace deeptide::launch
