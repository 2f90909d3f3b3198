// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// System calls that the kernel refuses, as older kernels and the sandboxes of containers do.
#pragma once

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace deeptide {

/// A system call and the error that it returns: always, or when its argument (0 to 5) has this value.
struct Denied {
  long number;
  int error;
  int argument = -1;
  uint32_t value = 0;
};

/// Makes the kernel refuse these calls to this process and its children from now on: call it in a forked child.
/// Returns false where the kernel cannot filter calls.
inline bool deny(std::initializer_list<Denied> calls) {
  const auto load = [](size_t offset) {
    return sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(offset));
  };
  std::vector<sock_filter> program;
  for (const Denied& call : calls) {
    const bool looks = call.argument >= 0;
    program.push_back(load(offsetof(seccomp_data, nr)));
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call.number), 0,
                               static_cast<uint8_t>(looks ? 3 : 1)));
    if (looks) {  // its lower half, on a little-endian machine
      program.push_back(load(offsetof(seccomp_data, args) + 8 * static_cast<size_t>(call.argument)));
      program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call.value, 0, 1));
    }
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(call.error)));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter) == 0;
}

}  // namespace deeptide
