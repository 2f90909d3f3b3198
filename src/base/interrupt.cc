// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Holds the check that a language binding installed.
#include "base/interrupt.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "deeptide/interpreter.h"

namespace deeptide {
namespace {

InterruptCheck& interrupt_check() {
  static InterruptCheck check;
  return check;
}

thread_local bool handling = false;
thread_local int updates = 0;

struct Handling {
  Handling() { handling = true; }
  ~Handling() { handling = false; }
};

}  // namespace

void set_interrupt_check(InterruptCheck check) { interrupt_check() = std::move(check); }

Update::Update() { ++updates; }
Update::~Update() { --updates; }

bool is_in_update() { return updates > 0; }

bool has_interpreter() { return interrupt_check() != nullptr; }

void check_interrupts() {
  if (!interrupt_check() || handling) return;
  const Handling scope;
  interrupt_check()();
}

void refuse_in_interrupt_handler(const char* method) {
  if (!handling) return;
  throw std::runtime_error(std::string("deeptide: the handler of a signal called ") + method +
                           ", but it interrupted a wait of the engine for other ranks. Let the handler set a flag, and "
                           "act on it between steps, on all ranks alike.");
}

}  // namespace deeptide
