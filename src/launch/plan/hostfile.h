// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Determines the hosts and slots of a job from the hostfile, --include, --exclude and counts.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace deeptide::launch {

/// A host and its slots in ascending order. A slot is the index of a device or, without devices, of a rank.
struct Host {
  std::string name;
  std::vector<int> slots;

  bool operator==(const Host&) const = default;
};

/// The user's choice of hosts; empty or -1: not given.
struct HostFilter {
  std::string include;  // "worker-1@worker-2:0,2-3": these hosts, or these slots of them
  std::string exclude;  // all but these, in the same form
  int num_nodes = -1;   // the first hosts
  int num_slots = -1;   // the first slots of each host

  bool given() const { return !include.empty() || !exclude.empty() || num_nodes >= 0 || num_slots >= 0; }
};

/// Parses lines `name slots=N`, `#` comments and empty lines; `source` names the file in errors.
/// Errors: UsageError with the line's number.
std::vector<Host> parse_hostfile(std::string_view text, const std::string& source);

/// Errors: UsageError if the file cannot be read, or as parse_hostfile.
std::vector<Host> read_hostfile(const std::string& path);

/// Returns the hosts and slots that pass `filter`, in the hostfile's order; drops hosts without slots.
/// Errors: UsageError naming an unknown host or slot, or if no host is left.
std::vector<Host> filter_hosts(const std::vector<Host>& hosts, const HostFilter& filter);

/// Parses numbers and ranges, "0,2-5". Returns each number once, ascending. Errors quote `option` and `text`.
/// Errors: UsageError.
std::vector<int> parse_number_list(const std::string& text, const std::string& option);

/// Returns the numbers as "0,1,3".
std::string join_numbers(const std::vector<int>& numbers);

int num_slots(const std::vector<Host>& hosts);

}  // namespace deeptide::launch
