// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Random secrets, through getrandom(2).
#include "launch/system/secret.h"

#include <sys/random.h>

#include <cerrno>
#include <system_error>

namespace deeptide::launch {

std::string make_secret(size_t num_digits) {
  std::string bytes(num_digits, '\0');
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw std::system_error(errno, std::generic_category(), "getrandom");
  }
  for (char& c : bytes) c = "0123456789abcdef"[static_cast<unsigned char>(c) % 16];
  return bytes;
}

bool same_secret(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace deeptide::launch
