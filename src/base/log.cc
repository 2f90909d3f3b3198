// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Writes messages to the user through spdlog.
#include "base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <memory>

namespace deeptide {
namespace {

spdlog::level::level_enum threshold() {
  const char* name = std::getenv("DEEPTIDE_LOG_LEVEL");
  return name ? spdlog::level::from_str(name) : spdlog::level::info;
}

spdlog::logger& logger() {
  static std::shared_ptr<spdlog::logger> instance = [] {
    const auto sink = std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
    const char* const no_color = std::getenv("NO_COLOR");  // no-color.org: any value but an empty one
    if (no_color != nullptr && *no_color != '\0') sink->set_color_mode(spdlog::color_mode::never);
    auto made = std::make_shared<spdlog::logger>("deeptide", sink);
    made->set_pattern("[deeptide] %^%v%$");
    made->set_level(threshold());
    return made;
  }();
  return *instance;
}

}  // namespace

void log(LogLevel level, const std::string& text) {
  static constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::debug, spdlog::level::info,
                                                          spdlog::level::warn, spdlog::level::err};
  logger().log(kLevels[static_cast<int>(level)], "{}", text);
}

}  // namespace deeptide
