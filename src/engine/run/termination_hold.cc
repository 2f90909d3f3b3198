// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Replaces the default action of SIGTERM, and brings it back.
#include "engine/run/termination_hold.h"

#include <csignal>
#include <mutex>

namespace deeptide::engine {
namespace {

std::mutex g_hold_mutex;
int g_holds = 0;
bool g_is_ours = false;  // the handler
volatile std::sig_atomic_t g_asked = 0;

void note(int) {
  if (g_asked != 0) {
    ::signal(SIGTERM, SIG_DFL);
    ::raise(SIGTERM);
  }
  g_asked = 1;
}

}  // namespace

TerminationHold::TerminationHold() {
  const std::lock_guard lock(g_hold_mutex);
  if (g_holds++ > 0) return;
  struct sigaction now = {};
  ::sigaction(SIGTERM, nullptr, &now);
  g_is_ours = now.sa_handler == SIG_DFL;
  if (!g_is_ours) return;
  g_asked = 0;
  struct sigaction ours = {};
  ours.sa_handler = note;
  ours.sa_flags = SA_RESTART;
  ::sigaction(SIGTERM, &ours, nullptr);
}

TerminationHold::~TerminationHold() {
  const std::lock_guard lock(g_hold_mutex);
  if (--g_holds > 0 || !g_is_ours) return;
  struct sigaction now = {};
  ::sigaction(SIGTERM, nullptr, &now);
  if (now.sa_handler != note) return;  // the program has set its own meanwhile
  ::signal(SIGTERM, SIG_DFL);
  if (g_asked != 0) ::raise(SIGTERM);
}

}  // namespace deeptide::engine
