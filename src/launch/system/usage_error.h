// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Defines the error for a wrong request of the user, as opposed to a failure of the system.
#pragma once

#include <stdexcept>

namespace deeptide::launch {

/// The user's request cannot be carried out. The text names the cause and the cure.
class UsageError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

}  // namespace deeptide::launch
