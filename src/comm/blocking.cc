// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Holds the functions that a language binding installed.
#include "comm/blocking.h"

#include <utility>

#include "deeptide/interpreter.h"

namespace deeptide::comm {
namespace {

BlockingRegion& blocking_region() {
  static BlockingRegion region;
  return region;
}

ErrorThrower& error_thrower() {
  static ErrorThrower thrower;
  return thrower;
}

}  // namespace

void run_blocking(const std::function<void()>& wait) {
  if (blocking_region()) {
    blocking_region()(wait);
  } else {
    wait();
  }
}

void throw_comm_error(const std::string& text) {
  const CommError error(text);
  if (error_thrower()) error_thrower()(error);
  throw error;
}

}  // namespace deeptide::comm

namespace deeptide {

void set_blocking_region(BlockingRegion region) { comm::blocking_region() = std::move(region); }
void set_error_thrower(ErrorThrower thrower) { comm::error_thrower() = std::move(thrower); }

}  // namespace deeptide
