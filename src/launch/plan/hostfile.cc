// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Implements the hostfile grammar and the filters that users of MPI and of DeepSpeed know.
#include "launch/plan/hostfile.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <numeric>
#include <set>
#include <sstream>

#include "base/text.h"
#include "launch/system/usage_error.h"

namespace deeptide::launch {
namespace {

constexpr int kMaxSlots = 4096;
constexpr const char* kForm = "expected 'NAME slots=N'";
constexpr std::string_view kSpaces = " \t\r\f\v";

// Parses all of `text` as a number of at most `most`; returns -1 if it is not one.
int to_number(std::string_view text, int most) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool digits = !text.empty() && text[0] >= '0' && text[0] <= '9';
  return digits && error == std::errc() && end == text.data() + text.size() && value <= most ? value : -1;
}

// A name becomes part of ssh's command line: ssh must not take it for an option, nor a shell for several words.
bool is_host_name(const std::string& name) {
  constexpr std::string_view kAllowed = "-_.:%@[]";
  return !name.empty() && name[0] != '-' && std::all_of(name.begin(), name.end(), [&](unsigned char c) {
    return std::isalnum(c) || kAllowed.find(static_cast<char>(c)) != std::string_view::npos;
  });
}

// Returns N of `slots=N`, or -1.
int slot_count(const std::string& word, std::string_view key) {
  return word.compare(0, key.size(), key) == 0 ? to_number(std::string_view(word).substr(key.size()), kMaxSlots) : -1;
}

Host parse_line(const std::string& line, const std::string& where) {
  std::istringstream stream(line.substr(0, line.find('#')));
  const std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
  const auto bad = [&](const std::string& why) { return UsageError(where + ": bad entry '" + line + "': " + why); };
  if (words.size() < 2) throw bad(kForm);
  if (!is_host_name(words[0])) throw bad("'" + words[0] + "' is not a valid host name");
  const int count = slot_count(words[1], "slots=");
  if (count < 0) throw bad(kForm + std::string(", N from 1 to ") + std::to_string(kMaxSlots));
  if (count == 0) throw bad("a host needs at least one slot; comment the line out with '#' to skip the host");
  for (size_t i = 2; i < words.size(); ++i) {
    if (slot_count(words[i], "max_slots=") < 0 && slot_count(words[i], "max-slots=") < 0) {
      throw bad("'" + words[i] + "' is not a known field; " + kForm);
    }
  }
  Host host{words[0], std::vector<int>(count)};
  std::iota(host.slots.begin(), host.slots.end(), 0);
  return host;
}

std::string names_of(const std::vector<Host>& hosts) {
  constexpr size_t kShown = 8;
  std::string names;
  for (size_t i = 0; i < std::min(hosts.size(), kShown); ++i) names += (i ? ", " : "") + hosts[i].name;
  return hosts.size() > kShown ? names + ", …" : names;
}

// Parses one NODE_SPEC of --include or --exclude. Returns the host with the named slots, or with all slots if none is.
Host parse_spec(const std::string& spec, const std::vector<Host>& hosts, const std::string& option) {
  const std::string where = option + ": '" + spec + "'";
  // IPv6 addresses contain colons, so look for a known host's name first.
  const auto is_named = [&](const std::string& name) {
    return std::find_if(hosts.begin(), hosts.end(), [&](const Host& host) { return host.name == name; });
  };
  auto host = is_named(spec);
  if (host != hosts.end()) return *host;
  const size_t colon = spec.rfind(':');
  const std::string name = spec.substr(0, colon);
  if (name.empty()) throw UsageError(where + " names no host; expected HOST or HOST:SLOT,SLOT joined by '@'");
  host = is_named(name);
  if (host == hosts.end()) {
    throw UsageError(where + ": host '" + name + "' is not in the hostfile, which lists " + names_of(hosts));
  }
  Host named{name, parse_number_list(spec.substr(colon + 1), option)};
  for (int slot : named.slots) {
    if (!std::binary_search(host->slots.begin(), host->slots.end(), slot)) {
      throw UsageError(where + ": host '" + name + "' has no slot " + std::to_string(slot) + "; it has " +
                       join_numbers(host->slots));
    }
  }
  return named;
}

// Returns the slots that `text` names, one set per host, in the order of `hosts`.
std::vector<std::set<int>> named_slots(const std::vector<Host>& hosts, const std::string& text,
                                       const std::string& option) {
  std::vector<std::set<int>> named(hosts.size());
  for (const std::string& spec : split(text, '@')) {
    const Host host = parse_spec(spec, hosts, option);
    for (size_t i = 0; i < hosts.size(); ++i) {
      if (hosts[i].name == host.name) named[i].insert(host.slots.begin(), host.slots.end());
    }
  }
  return named;
}

void check(const HostFilter& filter, size_t num_hosts) {
  if (!filter.include.empty() && !filter.exclude.empty()) {
    throw UsageError("--include and --exclude cannot be combined: give one of them");
  }
  if ((filter.num_nodes >= 0 || filter.num_slots >= 0) && !(filter.include.empty() && filter.exclude.empty())) {
    throw UsageError("--num_nodes and --num_gpus cannot be combined with --include or --exclude");
  }
  if (filter.num_nodes == 0 || filter.num_nodes > static_cast<int>(num_hosts)) {
    throw UsageError("--num_nodes " + std::to_string(filter.num_nodes) + ": the hostfile has " +
                     std::to_string(num_hosts) + (num_hosts == 1 ? " host" : " hosts"));
  }
}

}  // namespace

std::vector<Host> parse_hostfile(std::string_view text, const std::string& source) {
  std::vector<Host> hosts;
  std::vector<int> lines;
  std::istringstream stream{std::string(text)};
  int number = 0;
  for (std::string line; std::getline(stream, line);) {
    const std::string where = source + ":" + std::to_string(++number);
    const size_t first = line.find_first_not_of(kSpaces);
    if (first == std::string::npos || line[first] == '#') continue;
    line = line.substr(first, line.find_last_not_of(kSpaces) - first + 1);
    Host host = parse_line(line, where);
    for (size_t i = 0; i < hosts.size(); ++i) {
      if (hosts[i].name != host.name) continue;
      throw UsageError(where + ": duplicate entry for host '" + host.name + "', which is already on line " +
                       std::to_string(lines[i]) + "; list its slots in one entry");
    }
    hosts.push_back(std::move(host));
    lines.push_back(number);
  }
  if (hosts.empty()) throw UsageError(source + ": the hostfile lists no hosts; " + kForm);
  return hosts;
}

std::vector<Host> read_hostfile(const std::string& path) {
  std::ifstream stream(path);
  std::ostringstream text;
  // A folder can be opened but not read.
  if (!stream || (stream.peek(), stream.bad())) throw UsageError("hostfile '" + path + "' cannot be read");
  if (stream.peek() != std::ifstream::traits_type::eof()) text << stream.rdbuf();
  return parse_hostfile(text.str(), path);
}

std::vector<Host> filter_hosts(const std::vector<Host>& hosts, const HostFilter& filter) {
  check(filter, hosts.size());
  std::vector<Host> left = hosts;
  if (!filter.include.empty()) {
    const auto named = named_slots(hosts, filter.include, "--include");
    for (size_t i = 0; i < left.size(); ++i) left[i].slots.assign(named[i].begin(), named[i].end());
  }
  if (!filter.exclude.empty()) {
    const auto named = named_slots(hosts, filter.exclude, "--exclude");
    for (size_t i = 0; i < left.size(); ++i) {
      std::erase_if(left[i].slots, [&](int slot) { return named[i].count(slot) > 0; });
    }
  }
  if (filter.num_nodes > 0) left.resize(filter.num_nodes);
  for (Host& host : left) {
    if (filter.num_slots < 0) break;
    if (filter.num_slots > static_cast<int>(host.slots.size())) {
      throw UsageError("--num_gpus " + std::to_string(filter.num_slots) + ": host '" + host.name + "' has " +
                       std::to_string(host.slots.size()) + " slots");
    }
    host.slots.resize(filter.num_slots);
  }
  std::erase_if(left, [](const Host& host) { return host.slots.empty(); });
  if (left.empty()) throw UsageError("no host is left: --exclude removes all slots of the hostfile");
  return left;
}

std::vector<int> parse_number_list(const std::string& text, const std::string& option) {
  constexpr int kLargest = 65535;
  std::set<int> numbers;
  for (const std::string& part : split(text, ',')) {
    const size_t dash = part.find('-');
    const int first = to_number(std::string_view(part).substr(0, dash), kLargest);
    const int last = dash == std::string::npos ? first : to_number(std::string_view(part).substr(dash + 1), kLargest);
    if (first < 0 || last < first) {
      throw UsageError(option + ": '" + text + "' is not a list of numbers; expected numbers and ranges like 0,2-5");
    }
    for (int number = first; number <= last; ++number) numbers.insert(number);
  }
  return {numbers.begin(), numbers.end()};
}

std::string join_numbers(const std::vector<int>& numbers) {
  std::string joined;
  for (int number : numbers) joined += (joined.empty() ? "" : ",") + std::to_string(number);
  return joined;
}

int num_slots(const std::vector<Host>& hosts) {
  return std::accumulate(hosts.begin(), hosts.end(), 0,
                         [](int sum, const Host& host) { return sum + static_cast<int>(host.slots.size()); });
}

}  // namespace deeptide::launch
