#!/bin/sh
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing for the given purposes, and no more: tools/setup.sh [build] [lint] [test] [hosts] [wheel] [clang]
#
#   build   compiler, headers, .venv, torch: the library, the Python module, the command and the demo (the default)
#   lint    formatters, mypy; needs neither compiler nor torch
#   test    GoogleTest, pytest, mypy, and the MPI and SLURM launchers that tests start
#   hosts   what `make test-hosts` needs: SSH server, iptables, pdsh
#   wheel   the packaging backend
#   clang   clang, its sanitizers and clang-tidy: the presets clang and asan, `make tidy`
#
# Idempotent; quick when done. No service that it installs is started or enabled. Settings:
#   VENV=.venv                  the environment to make
#   PYTHON3=python3             the interpreter it is made from
#   TORCH_SPEC='torch==2.13.0'  what pip installs as torch, with any options of pip's (an index of CPU builds, a wheel)
set -eu
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
PYTHON3=${PYTHON3:-python3}
TORCH_SPEC=${TORCH_SPEC:-torch==2.13.0}
PURPOSES=${*:-build}
CLANG=19  # Debian 12's newest, and Debian 13's own

say() { echo "setup: $*" >&2; }

for purpose in $PURPOSES; do
  case $purpose in
    build | lint | test | hosts | wheel | clang) ;;
    *) say "got '$purpose', expected build, lint, test, hosts, wheel or clang" && exit 2 ;;
  esac
done

# Everything is done only if each purpose has the stamp of these very files.
stamp_of() { echo "$VENV/.deeptide-$1-$(cat tools/setup.sh tools/requirements/*.txt | cksum | tr ' ' '-')"; }
all_done() {
  for purpose in $PURPOSES; do
    [ -f "$(stamp_of "$purpose")" ] || return 1
  done
}

all_done && exit 0
# One at a time: two runs in one environment would spoil it. The second finds all done.
exec 9<tools/setup.sh
if command -v flock >/dev/null; then flock 9; fi
all_done && exit 0

have_header() {
  for root in /usr/include /usr/local/include; do
    [ -e "$root/$1" ] && return 0
  done
  return 1
}
have_program() { PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null; }
have_python_headers() {
  "$PYTHON3" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

# Prints the Debian packages whose contents are missing. The contents count, not package names, so that other
# distributions and hand-made installations pass.
needed_for() {
  case $1 in
    build)
      have_program g++ || echo g++
      have_program make || echo make
      have_program "$PYTHON3" || echo python3
      "$PYTHON3" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
      have_python_headers 2>/dev/null || echo python3-dev
      have_header nlohmann/json.hpp || echo nlohmann-json3-dev
      have_header CLI/CLI.hpp || echo libcli11-dev
      have_header spdlog/spdlog.h || echo libspdlog-dev
      have_header fmt/core.h || echo libfmt-dev
      have_header hwy/highway.h || echo libhwy-dev
      have_header gloo/algorithm.h || echo libgloo-dev
      have_header xxhash.h || echo libxxhash-dev
      ;;
    lint) "$PYTHON3" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv ;;
    test) have_header gtest/gtest.h || echo libgtest-dev ;;
    clang)
      tools/clang.sh clang++ >/dev/null 2>&1 || echo "clang-$CLANG libclang-rt-$CLANG-dev"
      tools/clang.sh clang-tidy >/dev/null 2>&1 || echo "clang-tidy-$CLANG"
      ;;
  esac
}

# Prints packages that help but may be absent: builds take longer, tests skip.
wanted_for() {
  case $1 in
    build)
      have_header liburing.h || echo liburing-dev  # io_uring in `deeptide bench io`
      have_program ccache || echo ccache
      have_program mold || echo mold
      ;;
    test)
      have_program ip || echo iproute2
      have_program mpirun.openmpi || echo openmpi-bin
      have_program mpirun.mpich || echo mpich
      have_program slurmctld && have_program slurmd && have_program srun || echo slurm-wlm
      have_program munged || echo munge
      ;;
    hosts)
      have_program sshd || echo openssh-server
      have_program ip || echo iproute2
      have_program iptables || echo iptables
      have_program pdsh || echo pdsh
      ;;
  esac
}

for_each_purpose() {
  for purpose in $PURPOSES; do
    "$1" "$purpose"
  done | sort -u | tr '\n' ' '
}

install_packages() {
  missing=$(for_each_purpose needed_for)
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    wanted="$missing$(for_each_purpose wanted_for)"
    [ -z "$wanted" ] && return
    say "installing Debian packages: $wanted"
    apt-get update -qq
    # shellcheck disable=SC2086  # a list of words
    quietly_install $wanted
    missing=$(for_each_purpose needed_for)
    [ -z "$missing" ] && return
    say "still missing after the installation: $missing"
    exit 1
  fi
  [ -z "$missing" ] && return
  say "these packages are needed and missing; install them, then run this again:"
  echo "  apt-get install -y $missing" >&2
  exit 1
}

# Debian starts and enables the services of a package as it installs it. The tests start servers of their own, so
# policy-rc.d forbids the start, and the unit files that were enabled meanwhile are disabled again.
quietly_install() {
  before=$(enabled_units)
  policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    trap 'exit 130' INT TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    made_policy=1
  fi
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o Dpkg::Use-Pty=0 --no-install-recommends "$@" >&2
  if [ "${made_policy:-0}" = 1 ]; then
    rm -f "$policy"
    trap - EXIT INT TERM
  fi
  for unit in $(enabled_units); do
    case " $before " in
      *" $unit "*) ;;
      *) disable_unit "$unit" ;;
    esac
  done
}

# Prints, on one line, the units that an init would start at boot: those of systemd, then those of SysV.
enabled_units() {
  find /etc/systemd/system -path '*.wants/*' -printf '%f ' 2>/dev/null || true
  find /etc/rc2.d -name 'S*' -printf '%f ' 2>/dev/null | sed 's/S[0-9][0-9]//g' || true
}

disable_unit() {
  say "leaving $1 disabled"
  find /etc/systemd/system -path "*.wants/$1" -delete 2>/dev/null || true
  case $1 in
    *.*) ;;
    *) update-rc.d "$1" disable >/dev/null 2>&1 || true ;;
  esac
}

check_compiler() {
  [ "$PURPOSES" != lint ] || return 0
  version=$(g++ -dumpfullversion -dumpversion)
  [ "${version%%.*}" -ge 12 ] && return
  say "g++ is $version, 12 or newer is needed (C++20)"
  exit 1
}

torch_version() { "$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))'; }

# Installs torch first and alone; whatever comes later must fit it and may not change it.
install_torch() {
  if ! torch_version >/dev/null 2>&1; then
    say "installing $TORCH_SPEC (some minutes on a slow network)"
    # shellcheck disable=SC2086  # words with pip's options
    $pip_install $TORCH_SPEC
  fi
  "$VENV/bin/python" -W ignore -c 'import torch' || { say "torch does not load"; exit 1; }
  echo "torch==$(torch_version)" >"$VENV/torch-constraint.txt"
}

install_python() {
  [ -x "$VENV/bin/python" ] || { say "making $VENV" && "$PYTHON3" -m venv "$VENV"; }
  # Python compiles what is imported, a tenth of it, as it is imported.
  pip_install="$VENV/bin/python -m pip --disable-pip-version-check install --no-compile"
  [ -t 1 ] || pip_install="$pip_install -q"  # a terminal sees the progress
  [ "$PURPOSES" = lint ] || install_torch
  touch "$VENV/torch-constraint.txt"  # empty if nothing here needs torch
  for purpose in $PURPOSES; do
    list=tools/requirements/$purpose.txt
    [ -f "$list" ] || continue
    say "installing $list"
    $pip_install -c "$VENV/torch-constraint.txt" -r "$list"
    [ "$purpose" != test ] || install_intel_mpi
  done
}

# Installs mpirun of Intel MPI, 129 MB, for tests that skip without it. It goes into a folder of its own, so that
# `mpirun` in PATH stays what it was; --no-deps, because its MPI library, which nobody links here, wants a libfabric.
install_intel_mpi() {
  [ "$(id -u)" = 0 ] && [ "$(uname -m)" = x86_64 ] || return 0
  [ -x "$VENV/impi/bin/mpirun" ] && return
  say "installing Intel MPI for its tests"
  $pip_install --no-deps --prefix "$VENV/impi" impi-rt==2021.19.0 || say "no Intel MPI: its tests will be skipped"
}

install_packages
check_compiler
install_python
for purpose in $PURPOSES; do
  touch "$(stamp_of "$purpose")"
done
say "done: $PURPOSES"
