#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# Serves `make bench` and its like: sets the peers up once, then runs the benchmark that the first argument names, or
# else the one that is called run; the other arguments are its own.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
"$here/setup"
name=run
if [[ ${1-} == [a-z]* ]]; then
  name=$1
  shift
fi
exec "$here/../.venv-bench/bin/python" "$here" "$name" "$@"
