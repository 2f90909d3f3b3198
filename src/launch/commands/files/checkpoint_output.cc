// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Prints what the commands on checkpoints found, for people and as JSON.
#include "launch/commands/files/checkpoint_output.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <map>
#include <memory>

#include "base/libraries/nlohmann.h"
#include "base/text.h"

namespace deeptide::launch {

namespace {

using nlohmann::ordered_json;

void print_json(const ordered_json& value) {
  std::printf("%s\n", write_json(value, 2, ordered_json::error_handler_t::replace).c_str());
}

std::string time_text(int64_t seconds) {
  if (seconds == 0) return "-";
  const std::time_t time = seconds;
  std::tm local{};
  ::localtime_r(&time, &local);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M", &local);
  return text;
}

std::string steps_text(int64_t steps) { return steps < 0 ? "-" : std::to_string(steps); }

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : " x ") + std::to_string(size);
  return text.empty() ? "scalar" : text;
}

ordered_json to_json(const CheckpointTensor& tensor) {
  return {{"name", tensor.name},
          {"role", tensor.role},
          {"shape", tensor.shape},
          {"dtype", tensor.dtype},
          {"bytes", tensor.bytes}};
}

void print_statistics(const CheckpointReader& reader, const CheckpointTensor& tensor) {
  std::printf("%s as %s: %s, %s, %s\n", tensor.name.c_str(), tensor.role.c_str(), shape_text(tensor.shape).c_str(),
              tensor.dtype.c_str(), bytes_text(tensor.bytes).c_str());
  const CheckpointStatistics statistics = checkpoint_statistics(reader, tensor);
  if (statistics.num_finite > 0) {
    std::printf("  least %.6g, most %.6g, mean %.6g, norm %.6g\n", statistics.least, statistics.most, statistics.mean,
                statistics.norm);
  }
  if (statistics.num_others > 0) {
    std::printf("  %lld elements are not finite\n", static_cast<long long>(statistics.num_others));
  }
  std::string first;
  for (const double value : statistics.first) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.6g", value);
    first += (first.empty() ? "" : ", ") + std::string(text);
  }
  if (!first.empty()) std::printf("  begins with %s\n", first.c_str());
}

const char* kind_text(CheckpointDifference::Kind kind) {
  if (kind == CheckpointDifference::Kind::only_first) return "only in the first";
  if (kind == CheckpointDifference::Kind::only_second) return "only in the second";
  return name_of(kind);
}

}  // namespace

CheckpointProgress progress_bar(const std::string& what) {
  if (!::isatty(STDERR_FILENO)) return {};
  constexpr int kWidth = 40;
  struct Line {
    int shown = -1;  // per mille
    ~Line() {
      if (shown >= 0) std::fputc('\n', stderr);
    }
  };
  return [what, line = std::make_shared<Line>()](int64_t done, int64_t total) {
    const double share = total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 1.0;
    const int now = static_cast<int>(1000.0 * share);
    if (now == line->shown) return;
    line->shown = now;
    const int filled = static_cast<int>(kWidth * share);
    std::fprintf(stderr, "\r%s [%s%s] %3d%% of %s ", what.c_str(), std::string(filled, '#').c_str(),
                 std::string(kWidth - filled, '.').c_str(), now / 10, bytes_text(total).c_str());
    std::fflush(stderr);
  };
}

void print_list(const std::vector<CheckpointSummary>& checkpoints, bool json) {
  if (json) {
    ordered_json list = ordered_json::array();
    for (const CheckpointSummary& c : checkpoints) {
      list.push_back({{"tag", c.tag},
                      {"latest", c.is_latest},
                      {"global_steps", c.global_steps},
                      {"world_size", c.world_size},
                      {"tensors", c.num_tensors},
                      {"bytes", c.bytes},
                      {"saved_at", c.saved_at_s},
                      {"hashes", c.has_hashes},
                      {"fault", c.fault}});
    }
    return print_json(list);
  }
  std::printf("%-24s %10s %6s %8s %9s  %s\n", "tag", "steps", "ranks", "tensors", "size", "saved");
  for (const CheckpointSummary& c : checkpoints) {
    std::printf("%-24s %10s %6d %8lld %9s  %s%s%s\n", c.tag.c_str(), steps_text(c.global_steps).c_str(), c.world_size,
                static_cast<long long>(c.num_tensors), bytes_text(c.bytes).c_str(), time_text(c.saved_at_s).c_str(),
                c.is_latest ? "  latest" : "", c.fault.empty() ? "" : ("  cannot be read: " + c.fault).c_str());
  }
}

void print_checkpoint(const CheckpointReader& reader, bool json) {
  int64_t bytes = 0;
  std::map<std::string, int64_t> by_role;
  for (const CheckpointTensor& tensor : reader.tensors()) {
    bytes += tensor.bytes;
    by_role[tensor.role.starts_with("buffer") ? "buffer" : tensor.role] += tensor.bytes;
  }
  if (json) {
    ordered_json tensors = ordered_json::array();
    for (const CheckpointTensor& tensor : reader.tensors()) tensors.push_back(to_json(tensor));
    return print_json({{"folder", reader.folder()},
                       {"global_steps", reader.global_steps()},
                       {"world_size", reader.world_size()},
                       {"bytes", bytes},
                       {"state", reader.state_json()},
                       {"client_state", reader.client_state_json()},
                       {"tensors", std::move(tensors)}});
  }
  std::printf("%s: %s steps, saved by %d ranks, %zu tensors, %s\n", reader.folder().c_str(),
              steps_text(reader.global_steps()).c_str(), reader.world_size(), reader.tensors().size(),
              bytes_text(bytes).c_str());
  for (const auto& [role, size] : by_role) std::printf("  %-16s %9s\n", role.c_str(), bytes_text(size).c_str());
  std::printf("%-48s %-12s %-6s %9s  %s\n", "name", "role", "dtype", "size", "shape");
  for (const CheckpointTensor& tensor : reader.tensors()) {
    std::printf("%-48s %-12s %-6s %9s  %s\n", tensor.name.c_str(), tensor.role.c_str(), tensor.dtype.c_str(),
                bytes_text(tensor.bytes).c_str(), shape_text(tensor.shape).c_str());
  }
}

void print_tensors(const CheckpointReader& reader, const std::string& name) {
  bool found = false;
  for (const CheckpointTensor& tensor : reader.tensors()) {
    if (tensor.name != name) continue;
    print_statistics(reader, tensor);
    found = true;
  }
  if (!found) reader.find(name);  // throws, with names that resemble it
}

void print_differences(const std::vector<CheckpointDifference>& differences, bool json) {
  if (json) {
    ordered_json list = ordered_json::array();
    for (const CheckpointDifference& d : differences) {
      list.push_back({{"name", d.name},
                      {"role", d.role},
                      {"differs", name_of(d.kind)},
                      {"first", d.first},
                      {"second", d.second},
                      {"elements", d.num_different},
                      {"most", d.max_difference}});
    }
    return print_json(list);
  }
  for (const CheckpointDifference& d : differences) {
    std::printf("%s as %s: %s", d.name.c_str(), d.role.c_str(), kind_text(d.kind));
    if (!d.first.empty() || !d.second.empty()) std::printf(" %s | %s", d.first.c_str(), d.second.c_str());
    if (d.num_different > 0) {
      std::printf(", %lld elements, by at most %.6g", static_cast<long long>(d.num_different), d.max_difference);
    }
    std::printf("\n");
  }
  if (differences.empty()) std::printf("equal\n");
}

}  // namespace deeptide::launch
