// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The version that this library was built as.
#include "deeptide/version.h"

namespace deeptide {

const char* version() { return DEEPTIDE_VERSION; }

}  // namespace deeptide
