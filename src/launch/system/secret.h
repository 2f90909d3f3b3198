// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Random secrets of one job, from the kernel's generator.
#pragma once

#include <string>

namespace deeptide::launch {

/// `num_digits` random hexadecimal digits. Errors: std::system_error.
std::string make_secret(size_t num_digits);

/// Compares in a time that does not depend on where they differ.
bool same_secret(const std::string& a, const std::string& b);

}  // namespace deeptide::launch
