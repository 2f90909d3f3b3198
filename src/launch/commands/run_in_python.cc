// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Runs the commands that are whole modules of Python.
#include "launch/commands/commands.h"
#include "launch/machine/python_module.h"

namespace deeptide::launch {

int run_explain(const Arguments& arguments) { become_module("deeptide._commands.explain", arguments); }
int run_plan(const Arguments& arguments) { become_module("deeptide._commands.plan", arguments); }
int run_report(const Arguments& arguments) { become_module("deeptide._commands.report", arguments); }

}  // namespace deeptide::launch
