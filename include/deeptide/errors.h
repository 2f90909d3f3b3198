// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Error types; the Python module maps them (ConfigError -> ValueError, CommError and CheckpointError -> RuntimeError).
#pragma once

#include <stdexcept>
#include <string>

#include "deeptide/export.h"

namespace deeptide {

/// The user's configuration is wrong. The text gives the place, the value found, the value expected and the cure.
class DEEPTIDE_API ConfigError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// A peer was lost or a wait timed out. The engine's groups are unusable afterwards.
class DEEPTIDE_API CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Too many steps in a row were skipped, and the configuration asks for an error then. Training may go on.
class DEEPTIDE_API NonFiniteError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Ranks hold different values of what they all have a copy of, and the configuration asks for an error then.
class DEEPTIDE_API DriftError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A checkpoint cannot be written or read, or does not fit the model.
class DEEPTIDE_API CheckpointError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace deeptide
