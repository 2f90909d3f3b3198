// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lets a language binding install how to wait, to be interrupted and to fail beneath its interpreter.
#pragma once

#include <functional>
#include <string>

#include "deeptide/errors.h"

namespace deeptide {

/// Runs a blocking wait with the interpreter's lock released if this thread holds it.
using BlockingRegion = std::function<void(const std::function<void()>&)>;
DEEPTIDE_API void set_blocking_region(BlockingRegion region);

/// Runs the interpreter's handlers of signals that have arrived, if this thread is the one that runs them, and throws
/// what they throw. Waits call it every quarter of a second, also inside torch's operators, without the interpreter's
/// lock.
using InterruptCheck = std::function<void()>;
DEEPTIDE_API void set_interrupt_check(InterruptCheck check);

/// Whether this thread waits in the middle of a step's update: a handler that throws there leaves half of it.
DEEPTIDE_API bool is_in_update();

/// Throws the error as the language's own. Torch's operators and autograd, between a wait and the user's code, would
/// turn a CommError into a nameless runtime error.
using ErrorThrower = std::function<void(const CommError&)>;
DEEPTIDE_API void set_error_thrower(ErrorThrower thrower);

/// Reads the states of the interpreter's own random generators as bytes, and sets them: checkpoints hold them beside
/// torch's. Called on the threads that call the engine, with or without the interpreter's lock.
struct InterpreterGenerators {
  std::function<std::string()> read;
  std::function<void(const std::string&)> set;
};
DEEPTIDE_API void set_interpreter_generators(InterpreterGenerators generators);

}  // namespace deeptide
