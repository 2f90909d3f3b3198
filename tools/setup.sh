#!/bin/sh
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# Makes all that building and testing need: system packages, .venv, torch, Python packages. Idempotent; quick when done.
#
#   VENV=.venv                  the environment to make
#   PYTHON3=python3             the interpreter it is made from
#   TORCH_SPEC='torch==2.13.0'  what pip installs as torch, with any options of pip's (an index of CPU builds, a wheel)
set -eu
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
PYTHON3=${PYTHON3:-python3}
TORCH_SPEC=${TORCH_SPEC:-torch==2.13.0}
STAMP="$VENV/.deeptide-$(cat tools/setup.sh tools/requirements.txt | cksum | tr ' ' '-')"

[ -f "$STAMP" ] && exit 0
# One at a time: two runs in one environment would spoil it. The second finds all done.
exec 9<tools/setup.sh
if command -v flock >/dev/null; then flock 9; fi
[ -f "$STAMP" ] && exit 0

say() { echo "setup: $*" >&2; }

have_header() {
  for root in /usr/include /usr/local/include; do
    [ -e "$root/$1" ] && return 0
  done
  return 1
}

have_python_headers() {
  "$PYTHON3" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

# Names of the Debian packages whose contents are not here. Contents are looked for, not package names,
# so that other distributions and hand-made installations pass.
missing_packages() {
  command -v g++ >/dev/null || echo g++
  command -v make >/dev/null || echo make
  command -v "$PYTHON3" >/dev/null || echo python3
  "$PYTHON3" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
  have_python_headers 2>/dev/null || echo python3-dev
  have_header nlohmann/json.hpp || echo nlohmann-json3-dev
  have_header CLI/CLI.hpp || echo libcli11-dev
  have_header spdlog/spdlog.h || echo libspdlog-dev
  have_header fmt/core.h || echo libfmt-dev
  have_header hwy/highway.h || echo libhwy-dev
  have_header gloo/algorithm.h || echo libgloo-dev
  have_header gtest/gtest.h || echo libgtest-dev
}

# Not needed, but wanted where we may install: faster builds, `make format`, more of the tests.
missing_extras() {
  have_header liburing.h || echo liburing-dev  # io_uring in `deeptide bench io`
  for tool in ccache mold clang-format; do
    command -v "$tool" >/dev/null || echo "$tool"
  done
  # For the tests of jobs over several hosts, which run as root only; they and those of world discovery skip without.
  [ -x /usr/sbin/sshd ] || echo openssh-server
  command -v ip >/dev/null || echo iproute2
  [ -x /usr/sbin/iptables ] || echo iptables
  command -v pdsh >/dev/null || echo pdsh
  command -v mpirun.openmpi >/dev/null || echo openmpi-bin
  command -v mpirun.mpich >/dev/null || echo mpich
  [ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/slurmd ] && command -v srun >/dev/null || echo slurm-wlm
  [ -x /usr/sbin/munged ] || echo munge
}

install_packages() {
  missing=$(missing_packages | tr '\n' ' ')
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    wanted="$missing$(missing_extras | tr '\n' ' ')"
    [ -z "$wanted" ] && return
    say "installing $wanted"
    apt-get update -qq
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $wanted >&2
    missing=$(missing_packages | tr '\n' ' ')
    [ -z "$missing" ] && return
    say "still missing after the installation: $missing"
    exit 1
  fi
  [ -z "$missing" ] && return
  say "these packages are needed and missing; install them, then run this again:"
  echo "  apt-get install -y $missing" >&2
  exit 1
}

check_compiler() {
  version=$(g++ -dumpfullversion -dumpversion)
  [ "${version%%.*}" -ge 12 ] && return
  say "g++ is $version, 12 or newer is needed (C++20)"
  exit 1
}

# torch comes first and alone; whatever comes later must fit it and may not change it.
install_python() {
  [ -x "$VENV/bin/python" ] || "$PYTHON3" -m venv "$VENV"
  pip="$VENV/bin/python -m pip --disable-pip-version-check"
  [ -t 1 ] || pip="$pip -q"  # a terminal sees the progress
  if ! torch_version >/dev/null 2>&1; then
    say "installing $TORCH_SPEC"
    # shellcheck disable=SC2086  # words with pip's options
    $pip install $TORCH_SPEC
  fi
  echo "torch==$(torch_version)" >"$VENV/torch-constraint.txt"
  say "torch $(torch_version); installing tools/requirements.txt"
  $pip install -c "$VENV/torch-constraint.txt" -r tools/requirements.txt
  install_intel_mpi
}

# Wanted by tests only, which skip without: mpirun of Intel MPI, 129 MB. In a folder of its own, so that `mpirun` in
# PATH stays what it was; --no-deps, because its MPI library, which nobody links here, wants a libfabric.
install_intel_mpi() {
  [ "$(id -u)" = 0 ] && [ "$(uname -m)" = x86_64 ] || return 0
  [ -x "$VENV/impi/bin/mpirun" ] && return
  say "installing Intel MPI for its tests"
  $pip install --no-deps --prefix "$VENV/impi" impi-rt==2021.19.0 || say "no Intel MPI: its tests will be skipped"
}

torch_version() { "$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))'; }

install_packages
check_compiler
install_python
"$VENV/bin/python" -c 'import torch' || { say "torch does not load"; exit 1; }
touch "$STAMP"
say "done"
