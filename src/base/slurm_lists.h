// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// The short forms in which SLURM's variables list nodes and tasks.
#pragma once

#include <string>

namespace deeptide {

/// "node03" of "node[03-07,9],x"; empty of an empty list.   Errors: ConfigError where a bracket holds no such list.
std::string first_of_node_list(const std::string& list);

/// Of "2(x3),1", so many tasks on each node in turn, those of node `index`; 0 if the text does not say.
int tasks_of_node(const std::string& counts, int index);

}  // namespace deeptide
