// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// SHA-256 and HMAC for the job's token, so that library and launcher need no cryptographic library.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace deeptide {

using Digest = std::array<uint8_t, 32>;

/// FIPS 180-4.
Digest sha256(std::string_view bytes);

/// RFC 2104 over SHA-256, in lower-case hexadecimal.
std::string hmac_sha256_hex(std::string_view key, std::string_view message);

/// Compares in a time that does not depend on where the texts differ.
bool equal_in_constant_time(std::string_view a, std::string_view b);

/// Returns `bytes` random bytes from the kernel, in hexadecimal. Errors: std::system_error.
std::string random_hex(size_t bytes);

}  // namespace deeptide
