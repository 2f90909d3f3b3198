// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Catches what a call throws, as text.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

namespace deeptide {

/// Returns the text of the exception that `call` throws; "none" if it throws none.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "none";
}

}  // namespace deeptide
