#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# What `make bench` calls: sets the peers up once, then runs the comparison; arguments go to run.py.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
"$here/setup"
exec "$here/../.venv-bench/bin/python" "$here/run.py" "$@"
