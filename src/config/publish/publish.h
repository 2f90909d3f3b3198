// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Wording that both published forms of the table share.
#pragma once

#include <string>

#include "config/table/schema.h"

namespace deeptide::config {

/// "Honoured.", "Not supported yet: …", "No effect here: …"
std::string status_words(const Key& key);

}  // namespace deeptide::config
