// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Reads shares, and solves them for what lies in memory: on a CPU the device's tier is in its memory.
#include "config/check/placement.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace deeptide::config {
namespace {

const std::string kSection = "deeptide.placement.";

/// A share of one tier: a part of all bytes, a number of bytes, or what the other tiers leave.
struct TierShare {
  double fraction = 0.0;
  int64_t bytes = 0;
  bool rest = false;
};

/// Units by their names: powers of 1000 and 1024.
std::optional<double> bytes_of_unit(std::string_view unit) {
  if (unit == "B") return 1.0;
  constexpr std::string_view kPrefixes = "KMGT";
  const size_t power = unit.empty() ? std::string_view::npos : kPrefixes.find(unit[0]);
  if (power == std::string_view::npos) return std::nullopt;
  const bool binary = unit.substr(1) == "iB";
  if (!binary && unit.substr(1) != "B") return std::nullopt;
  return std::pow(binary ? 1024.0 : 1000.0, static_cast<double>(power + 1));
}

/// An amount and its unit: "8GiB", "40%".
struct Amount {
  double number = 0.0;
  std::string_view unit;
};

std::optional<Amount> parse_amount(std::string_view text) {
  if (text.empty() || text[0] < '0' || text[0] > '9') return std::nullopt;
  const size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string number(text.substr(0, digits));
  if (std::count(number.begin(), number.end(), '.') > 1) return std::nullopt;
  std::string_view unit = text.substr(digits);
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  return Amount{std::strtod(number.c_str(), nullptr), unit};
}

/// Reads "8GiB", "40%", "rest".
std::optional<TierShare> parse_share(const std::string& text) {
  if (text == "rest") return TierShare{.rest = true};
  if (const auto bytes = parse_bytes(text)) return TierShare{.bytes = *bytes};
  const auto amount = parse_amount(text);
  if (!amount || amount->unit != "%" || amount->number > 100.0) return std::nullopt;
  return TierShare{.fraction = amount->number / 100.0};
}

/// The tiers of one kind: those that lie in memory, and files.
struct Shares {
  std::optional<TierShare> device;  // one of those in memory
  std::vector<TierShare> memory;
  std::optional<TierShare> files;
};

/// Whether the text places this kind. Adds a problem for each share that cannot be read.
bool read_shares(const Values& values, const std::string& kind, Shares& shares, Problems& problems) {
  bool given = false;
  for (const std::string tier : {"device", "cpu", "nvme"}) {
    const std::string path = kSection + kind + "." + tier;
    if (!values.given(path)) continue;
    given = true;
    const std::string text = values.word(path);
    const auto share = parse_share(text);
    if (!share) {
      problems.add(values.at(path).line, values.at(path).shown,
                   "expected a size such as \"8GiB\", a share such as \"40%\", or \"rest\", got \"" + text + "\"");
      continue;
    }
    if (tier == "nvme") {
      shares.files = share;
    } else {
      shares.memory.push_back(*share);
      if (tier == "device") shares.device = share;
    }
  }
  return given;
}

/// Returns what is wrong with the shares together, or an empty text.
std::string problem_of(const Shares& shares) {
  std::vector<TierShare> all = shares.memory;
  if (shares.files) all.push_back(*shares.files);
  double fraction = 0.0;
  const auto rests = std::count_if(all.begin(), all.end(), [](const TierShare& share) { return share.rest; });
  for (const TierShare& share : all) fraction += share.fraction;
  constexpr double kRounding = 1e-9;
  if (rests > 1) return "more than one tier takes the \"rest\"; keep one";
  if (fraction > 1.0 + kRounding) return "the tiers take more than 100 % together; lower a share";
  const bool whole = std::abs(fraction - 1.0) < kRounding;
  if (rests == 0 && !whole) return "the tiers do not say where all of it lies; give one of them \"rest\"";
  return "";
}

/// Files take what memory leaves, or memory what files leave.
MemoryShare solve(const Shares& shares) {
  MemoryShare memory{0.0, 0};
  bool rest = false;
  for (const TierShare& share : shares.memory) {
    memory.fraction += share.fraction;
    memory.bytes += share.bytes;
    rest = rest || share.rest;
  }
  if (rest) return {1.0 - (shares.files ? shares.files->fraction : 0.0), -(shares.files ? shares.files->bytes : 0)};
  if (!shares.files) return {};
  return memory;
}

/// Returns an accelerator's part.
MemoryShare solve_device(const Shares& shares) {
  if (!shares.device) return {0.0, 0};
  if (!shares.device->rest) return {shares.device->fraction, shares.device->bytes};
  MemoryShare left = solve(shares);  // of the tiers in memory, those that do not take the rest
  for (const TierShare& share : shares.memory) {
    left.fraction -= share.fraction;
    left.bytes -= share.bytes;
  }
  return left;
}

/// Returns how another section places this kind in files, or an empty text.
std::string other_place(const Values& values, const std::string& kind) {
  if (kind == "gradients") return "";
  const std::string section = kind == "parameters" ? "offload_param" : "offload_optimizer";
  if (values.word("zero_optimization." + section + ".device") != "nvme") return "";
  return "contradicts zero_optimization." + section + ".device \"nvme\"; keep one of them";
}

/// Returns why what the text sends to files cannot go there, or an empty text.
std::string obstacle(const Values& values, const std::string& kind) {
  const int64_t stage = values.integer("zero_optimization.stage");
  const std::string now = "; the stage is " + std::to_string(stage);
  if (!values.given(kSection + "nvme_path")) {
    return "files need deeptide.placement.nvme_path: a folder on the drive, or a list of folders";
  }
  if (kind == "optimizer_states") return "";
  if (kind == "parameters") {
    return stage == 3 ? "" : "parameters go to files at stage 3, where each rank keeps a shard of them" + now;
  }
  if (stage == 0) return "gradients go to files from stage 1 on, where each rank steps a shard of them" + now;
  return values.flag("deeptide.keep_grad") ? "contradicts deeptide.keep_grad, which keeps whole gradients in memory"
                                           : "";
}

/// The section has no entry of its own: the first of its tiers that is given names it.
void blame_section(const Values& values, const std::string& kind, const std::string& problem, Problems& problems) {
  for (const std::string tier : {"nvme", "cpu", "device"}) {
    const std::string path = kSection + kind + "." + tier;
    if (!values.given(path)) continue;
    return problems.add(values.at(path).line, kSection + kind, problem);
  }
}

}  // namespace

std::optional<int64_t> parse_bytes(const std::string& text) {
  const auto amount = parse_amount(text);
  const auto unit = amount ? bytes_of_unit(amount->unit) : std::nullopt;
  if (!unit || amount->number * *unit >= 0x1p62) return std::nullopt;
  return std::llround(amount->number * *unit);
}

void read_placement(const Values& values, PlacementConfig& placement, Problems& problems) {
  const std::tuple<const char*, std::optional<MemoryShare>&, std::optional<MemoryShare>&> fields[] = {
      {"optimizer_states", placement.optimizer_states, placement.optimizer_states_on_device},
      {"parameters", placement.parameters, placement.parameters_on_device},
      {"gradients", placement.gradients, placement.gradients_on_device}};
  for (const auto& [kind, field, on_device] : fields) {
    Shares shares;
    const bool readable = problems.empty();
    if (!read_shares(values, kind, shares, problems) || !readable || !problems.empty()) continue;
    field = solve(shares);
    if (const MemoryShare device = solve_device(shares); !device.is_all()) on_device = device;
    std::string problem = problem_of(shares);
    if (problem.empty() && !field->is_all()) problem = obstacle(values, kind);
    if (problem.empty()) problem = other_place(values, kind);
    if (!problem.empty()) blame_section(values, kind, problem, problems);
  }
}

}  // namespace deeptide::config

namespace deeptide {

int64_t MemoryShare::of(int64_t total) const {
  return std::clamp<int64_t>(std::llround(fraction * static_cast<double>(total)) + bytes, 0, total);
}

}  // namespace deeptide
