// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Installs a signal on which a thread writes its native stack for the launcher.
#pragma once

namespace deeptide::trace {

/// Installs the handler if DEEPTIDE_STACKS_FD names the launcher's file. False: it does not, or the signal is in use.
bool answer_stack_signals();

}  // namespace deeptide::trace
