// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The one file that compiles fmt, of the release that torch's headers bring.
#include "base/libraries/format.h"

#include <fmt/format.h>

namespace deeptide {

std::string format_erased(fmt::string_view pattern, fmt::format_args values) { return fmt::vformat(pattern, values); }

}  // namespace deeptide
