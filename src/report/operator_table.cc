// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Prints a profiled step of a program in C++: totals, then the operators that take longest.

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>

#include "base/libraries/format.h"
#include "base/log.h"
#include "base/text.h"
#include "report/reporter.h"

namespace deeptide::report {
namespace {

constexpr size_t kMostShown = 12;

/// "1.25 T": with a thousand's prefix.
std::string scaled(double value, const char* unit) {
  static constexpr const char* kPrefixes[] = {"", "K", "M", "G", "T", "P"};
  size_t prefix = 0;
  for (; value >= 1000.0 && prefix + 1 < std::size(kPrefixes); ++prefix) value /= 1000.0;
  return format_text("{:.2f} {}{}", value, kPrefixes[prefix], unit);
}

std::string totals_of(const std::vector<OperatorUse>& uses, bool backward, const MachinePeak& peak) {
  int64_t macs = 0;
  double seconds = 0.0;
  for (const OperatorUse& use : uses) {
    if (use.backward != backward) continue;
    macs += use.macs;
    seconds += use.seconds;
  }
  const char* name = backward ? "bwd" : "fwd";
  const double flops = 2.0 * static_cast<double>(macs);
  std::string text =
      format_text("\n{:<70}  {:<8}", format_text("{} MACs per GPU:", name), scaled(static_cast<double>(macs), "MACs"));
  text += format_text("\n{:<70}  {:<8}", format_text("{} flops per GPU:", name), scaled(flops, ""));
  text += format_text("\n{:<70}  {:<8}", format_text("{} latency of operators:", name),
                      format_text("{:.2f} ms", 1e3 * seconds));
  if (seconds <= 0.0) return text;
  text += format_text("\n{:<70}  {}", format_text("{} FLOPS per GPU = flops per GPU / latency:", name),
                      scaled(flops / seconds, "FLOPS"));
  const double share = peak.share_of(flops, seconds);
  if (share >= 0.0) {
    text += format_text(" ({:.1f} % of this machine's measured {})", 100.0 * share, scaled(peak.flops_per_s, "FLOPS"));
  }
  return text;
}

/// Names the operators that may multiply and that no total holds; "" without such.
std::string uncounted_of(const std::vector<OperatorUse>& uses) {
  std::map<std::string, int64_t> calls;
  for (const OperatorUse& use : uses) {
    if (use.is_uncounted) calls[use.name] += use.calls;
  }
  std::string text;
  for (const auto& [name, times] : calls) text += format_text("{}{} x {}", text.empty() ? "" : ", ", name, times);
  return text.empty() ? text : format_text("\n{:<70}  {}", "operators without a formula, in no total:", text);
}

}  // namespace

void Reporter::write_profile(int64_t step, const std::vector<OperatorUse>& uses, const MachinePeak& peak) const {
  std::string text = "-------------------------- DeepSpeed Flops Profiler --------------------------";
  text += format_text("\nProfile Summary at step {}:", step);
  for (const bool backward : {false, true}) text += totals_of(uses, backward, peak);
  text += uncounted_of(uses);
  std::vector<OperatorUse> longest = uses;
  std::sort(longest.begin(), longest.end(),
            [](const OperatorUse& a, const OperatorUse& b) { return a.seconds > b.seconds; });
  if (config_.flops_profiler().detailed)
    text += format_text("\n{:<58}{:>8}{:>14}{:>14}{:>12}", "operator", "calls", "MACs", "moved", "ms");
  for (size_t i = 0; config_.flops_profiler().detailed && i < std::min(longest.size(), kMostShown); ++i) {
    const OperatorUse& use = longest[i];
    text += format_text("\n{:<58}{:>8}{:>14}{:>14}{:>12.3f}", use.name + (use.backward ? " (backward)" : ""), use.calls,
                        scaled(static_cast<double>(use.macs), ""), bytes_text(use.bytes), 1e3 * use.seconds);
  }
  const auto& path = config_.flops_profiler().output_file;
  if (!path) return static_cast<void>(std::printf("%s\n", text.c_str()));
  std::ofstream file(*path);
  file << text << "\n";
  if (!file) log(LogLevel::warning, "flops_profiler: cannot write '" + *path + "'; check the folder and its space");
}

}  // namespace deeptide::report
