// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Examines one fact at a time.
#include "launch/commands/doctor/doctor.h"

#include <linux/io_uring.h>
#include <netdb.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "base/text.h"
#include "io/io_engine.h"
#include "launch/commands/doctor/doctor_facts.h"
#include "launch/plan/host_commands.h"
#include "launch/plan/options.h"
#include "launch/system/child_output.h"

namespace deeptide::launch {
namespace {

using Verdict = Finding::Verdict;

constexpr uint64_t kMiB = 1 << 20;
constexpr double kPythonTimeout = 60.0;
constexpr double kSshTimeout = 15.0;  // ssh itself gives up connecting after 10 s

std::string size_text(uint64_t bytes) { return bytes_text(static_cast<int64_t>(bytes)); }

Finding judge_instruction_set() {
#if defined(__x86_64__)
  const char* best = __builtin_cpu_supports("avx512bf16") ? "AVX-512 with BF16"
                     : __builtin_cpu_supports("avx512f")  ? "AVX-512"
                     : __builtin_cpu_supports("avx2")     ? "AVX2"
                     : __builtin_cpu_supports("sse4.2")   ? "SSE4.2"
                                                          : "SSE2";
  if (!__builtin_cpu_supports("avx2")) {
    return {Verdict::warn, "instruction set",
            std::string(best) + ": Deeptide's kernels run at a fraction of their speed",
            "use a machine, or a virtual machine's CPU model, with AVX2"};
  }
  return {Verdict::ok, "instruction set", std::string(best), ""};
#else
  return {Verdict::ok, "instruction set", "not x86-64", ""};
#endif
}

Finding judge_host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(name, nullptr, nullptr, &found);
  if (error == 0) ::freeaddrinfo(found);
  if (error == 0) return {Verdict::ok, "host name", std::string(name) + " resolves", ""};
  return {Verdict::warn, "host name", std::string(name) + " does not resolve: " + ::gai_strerror(error),
          "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to the network interface"};
}

int try_io_uring() {
  io_uring_params parameters{};
  const long fd = ::syscall(__NR_io_uring_setup, 1, &parameters);
  if (fd < 0) return errno;
  ::close(static_cast<int>(fd));
  return 0;
}

std::vector<Finding> python_findings(const std::string& python) {
  const ChildOutput child = run_child({python, "-c", kDoctorFacts}, kPythonTimeout);
  std::vector<Finding> findings;
  std::istringstream lines(child.text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string verdict, subject, text, cure;
    if (!std::getline(fields, verdict, '\t') || !std::getline(fields, subject, '\t')) continue;
    std::getline(fields, text, '\t');
    std::getline(fields, cure, '\t');
    findings.push_back({verdict == "ok" ? Verdict::ok : Verdict::fail, subject, text, cure});
  }
  if (child.late || child.code != 0) {
    const std::string what =
        child.late ? "did not answer within 60 s" : "ended with code " + std::to_string(child.code);
    findings.push_back({Verdict::fail, "python", python + " " + what + ": " + child.text.substr(0, 300),
                        "check that `" + python + " -c 'import torch'` works"});
  }
  return findings;
}

// Finds the version and skips any output of the login before it.
std::string version_in(const std::string& text) {
  const std::string head = "deeptide ";
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(head)) return line.substr(head.size());
  }
  return "";
}

uint64_t limit_of(__rlimit_resource resource) {
  rlimit limit{};
  ::getrlimit(resource, &limit);
  return limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : limit.rlim_cur;
}

}  // namespace

Finding judge_shared_memory(uint64_t free_bytes) {
  const std::string text = size_text(free_bytes) + " free in /dev/shm";
  const std::string cure = "in a container: --shm-size=8g or --ipc=host; else remount it with a larger size=";
  if (free_bytes < 64 * kMiB) return {Verdict::fail, "shared memory", text, cure};
  if (free_bytes < 1024 * kMiB) return {Verdict::warn, "shared memory", text, cure};
  return {Verdict::ok, "shared memory", text, ""};
}

Finding judge_locked_memory(uint64_t limit_bytes) {
  if (limit_bytes == UINT64_MAX) return {Verdict::ok, "locked memory", "unlimited", ""};
  const std::string text = size_text(limit_bytes) + " at most";
  if (limit_bytes >= 1024 * kMiB) return {Verdict::ok, "locked memory", text, ""};
  return {Verdict::warn, "locked memory", text + ": this limits pinned buffers and registered I/O",
          "ulimit -l unlimited, or memlock in /etc/security/limits.conf; in a container: --ulimit memlock=-1"};
}

Finding judge_huge_pages(const std::string& setting) {
  if (setting.find("[never]") != std::string::npos) {
    return {Verdict::warn, "huge pages", "never: large CPU tensors fault page by page",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"};
  }
  if (setting.empty())
    return {Verdict::warn, "huge pages", "not supported by this kernel", "use a kernel that has them"};
  const size_t open = setting.find('['), close = setting.find(']');
  return {Verdict::ok, "huge pages", setting.substr(open + 1, close - open - 1), ""};
}

Finding judge_open_files(uint64_t limit) {
  const std::string text = limit == UINT64_MAX ? "unlimited" : std::to_string(limit) + " at most";
  if (limit >= 4096) return {Verdict::ok, "open files", text, ""};
  return {Verdict::warn, "open files", text + ": ranks and data loaders may run out", "ulimit -n 65536"};
}

Finding judge_io_uring(int error, bool built) {
  if (error == 0 && built) return {Verdict::ok, "io_uring", "works", ""};
  if (error == 0) {
    return {Verdict::warn, "io_uring", "works, but this build has no liburing: threads read and write files instead",
            "install liburing (Debian: liburing-dev) and build again"};
  }
  const std::string why = std::strerror(error);
  return {Verdict::warn, "io_uring", why + ": threads read and write files instead",
          error == ENOSYS ? "use Linux 5.1 or newer"
                          : "allow it with sysctl kernel.io_uring_disabled=0 and in the container's seccomp profile"};
}

std::vector<Finding> examine_machine(const std::string& python) {
  struct statvfs shm {};
  const uint64_t shm_free = ::statvfs("/dev/shm", &shm) == 0 ? uint64_t{shm.f_bavail} * shm.f_frsize : 0;
  std::vector<Finding> findings = python_findings(python);
  findings.push_back(judge_instruction_set());
  findings.push_back(judge_shared_memory(shm_free));
  findings.push_back(judge_locked_memory(limit_of(RLIMIT_MEMLOCK)));
  findings.push_back(judge_huge_pages(first_line_of("/sys/kernel/mm/transparent_hugepage/enabled")));
  findings.push_back(judge_open_files(limit_of(RLIMIT_NOFILE)));
  findings.push_back(judge_io_uring(try_io_uring(), io::has_io_uring()));
  findings.push_back(judge_host_name());
  return findings;
}

Finding examine_host(const Options& options, const std::string& host) {
  const ChildOutput child = run_child(ssh_command(options, host, remote_line(options, "--version")), kSshTimeout);
  const std::string subject = "ssh " + host;
  if (child.code == 127 && child.text.empty()) {
    return {Verdict::fail, subject, "ssh is not installed", "install openssh-client"};
  }
  const std::string own = DEEPTIDE_VERSION, version = version_in(child.text);
  if (!child.late && child.code == 0 && version == own) {
    return {Verdict::ok, subject, "the login works without a password; deeptide " + own, ""};
  }
  if (!child.late && child.code == 0 && !version.empty()) {
    return {Verdict::fail, subject, "has deeptide " + version + ", but this host has " + own,
            "install the same version there"};
  }
  if (!child.late && child.code == 127) {
    return {Verdict::fail, subject, "the login works, but the host has no deeptide command",
            "install it there at the same path, or add it to PATH, e.g. with --venv_script"};
  }
  const std::string said =
      child.late ? "no answer within 15 s" : child.text.substr(0, child.text.find_first_of("\r\n"));
  return {Verdict::fail, subject, said.empty() ? "ended with code " + std::to_string(child.code) : said,
          "make `ssh -o BatchMode=yes " + host + " true` work: a key in authorized_keys, the host in known_hosts"};
}

std::string to_line(const Finding& finding) {
  constexpr const char* kWords[] = {"ok    ", "warn  ", "fail  "};
  std::string line = kWords[static_cast<int>(finding.verdict)] + finding.subject + ": " + finding.text;
  return finding.cure.empty() ? line : line + ". Cure: " + finding.cure;
}

}  // namespace deeptide::launch
