// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Base64 in the URL-safe alphabet, in which DeepSpeed's tools pass a configuration on a command line.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace deeptide::config {

/// The decoded bytes, or nothing when `text` holds other characters. Skips surrounding blanks and padding.
std::optional<std::string> decode_base64_url(std::string_view text);

}  // namespace deeptide::config
