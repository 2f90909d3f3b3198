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
    auto made = std::make_shared<spdlog::logger>("deeptide", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
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
