// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The short forms in which SLURM's variables list nodes and tasks.
#pragma once

#include <string>

namespace deeptide {

/// Returns "node03" for "node[03-07,9],x"; empty for an empty list. Errors: ConfigError if a bracket is malformed.
std::string first_of_node_list(const std::string& list);

/// Returns the tasks of node `index` from "2(x3),1", the tasks of each node in turn; 0 if the text does not state it.
int tasks_of_node(const std::string& counts, int index);

}  // namespace deeptide
