#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# Serves `make bench` and its like: sets the peers up once, then runs a benchmark: the script that the first argument
# names, or run.py; the other arguments are its own.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
"$here/setup"
script=run.py
if [[ ${1-} == *.py ]]; then
  script=$1
  shift
fi
exec "$here/../.venv-bench/bin/python" "$here/$script" "$@"
