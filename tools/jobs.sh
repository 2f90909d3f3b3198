#!/bin/sh
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# Prints how many compilers to run at once: one per core, with 2.5 GiB of available memory for each.
set -eu
cores=$(env -u OMP_NUM_THREADS nproc) # nproc heeds the variable
by_memory=$(awk '/^MemAvailable:/ { print int($2 / (2.5 * 1024 * 1024)) }' /proc/meminfo)
jobs=$((by_memory < cores ? by_memory : cores))
echo $((jobs < 1 ? 1 : jobs))
