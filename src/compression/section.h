// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The section "compression_training": which modules, which technique, and what is wrong with it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/libraries/nlohmann.h"
#include "deeptide/config.h"

namespace deeptide::compression {

using Json = nlohmann::ordered_json;

inline constexpr const char* kSection = "compression_training";
inline constexpr const char* kWeights = "weight_quantization";
inline constexpr const char* kInputs = "activation_quantization";

/// One of a technique's "different_groups"; `params` holds the shared parameters too.
struct Group {
  std::string technique, name;
  std::string path;  // its keys, for errors
  Json params;
  std::vector<std::string> modules;
  std::vector<std::vector<std::string>> related;  // empty, or patterns for each of `modules`
};

/// The section with its defaults; "quantize_training" becomes a group of it. Errors: ConfigError for both.
Json section_of(const Config& config);
/// "quantize_training.eigenvalue", if the section asks for eigenvalues.
std::optional<Json> eigenvalue_section(const Config& config);
/// Groups of all techniques that are on, in the order in which they are made final. Errors: ConfigError naming the key.
std::vector<Group> groups_of(const Json& section);

}  // namespace deeptide::compression
