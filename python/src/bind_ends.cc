// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Keeps a process alive through the end of its interpreter.
#include <pthread.h>
#include <unistd.h>

#include <cstring>
#include <exception>

#include "bindings.h"

namespace deeptide::python {
namespace {

std::terminate_handler g_previous = nullptr;
pthread_t g_main;

bool is_joined_at_exit() {
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof name);
  return pthread_equal(pthread_self(), g_main) || std::strcmp(name, "pt_gloo_runloop") == 0;
}

// Before 3.14 an interpreter that ends unwinds each thread that asks for its lock, through frames of C++ that end the
// process at that. Such a thread sleeps here instead, as 3.14's do, except where the process would wait for it.
[[noreturn]] void sleep_or_terminate() {
  if (!std::current_exception() && !is_joined_at_exit()) {
    for (;;) pause();
  }
  if (g_previous) g_previous();
  std::abort();
}

}  // namespace

void bind_ends(py::module_& module) {
  module.def(
      "_let_threads_sleep",
      [] {
        g_main = pthread_self();
        g_previous = std::set_terminate(sleep_or_terminate);
      },
      "From now on a thread that the ending interpreter unwinds sleeps instead of ending the process.");
}

}  // namespace deeptide::python
