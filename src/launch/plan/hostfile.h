// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The hosts of a job and the slots used on each: the hostfile, narrowed by --include, --exclude and counts.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace deeptide::launch {

/// A host and its slots in ascending order; a slot is the index of a device, or of a rank where there are none.
struct Host {
  std::string name;
  std::vector<int> slots;

  bool operator==(const Host&) const = default;
};

/// The user's choice of hosts; empty or -1: not given.
struct HostFilter {
  std::string include;  // "worker-1@worker-2:0,2-3": these hosts, or these slots of them
  std::string exclude;  // the same form: all but these
  int num_nodes = -1;   // the first hosts
  int num_slots = -1;   // the first slots of each host

  bool given() const { return !include.empty() || !exclude.empty() || num_nodes >= 0 || num_slots >= 0; }
};

/// Parses lines `name slots=N`, `#` comments and empty lines; `source` names the file in errors.
/// Errors: UsageError with the line's number.
std::vector<Host> parse_hostfile(std::string_view text, const std::string& source);

/// Errors: UsageError if the file cannot be read, or as parse_hostfile.
std::vector<Host> read_hostfile(const std::string& path);

/// The hosts and slots that `filter` leaves, in the hostfile's order; hosts without slots are dropped.
/// Errors: UsageError naming the unknown host or slot, or if nothing is left.
std::vector<Host> filter_hosts(const std::vector<Host>& hosts, const HostFilter& filter);

/// Numbers and ranges, "0,2-5", ascending and each once. `option` and `text` are quoted in errors.
/// Errors: UsageError.
std::vector<int> parse_number_list(const std::string& text, const std::string& option);

/// "0,1,3" of the numbers.
std::string join_numbers(const std::vector<int>& numbers);

int num_slots(const std::vector<Host>& hosts);

}  // namespace deeptide::launch
