#!/bin/sh
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# What `make test-peers` calls: sets up .venv-peers and .venv-peers-before, both over VENV, then runs the tests in the
# first and, with the Transformers before, what knows no newer library in the second. Arguments are pytest's.
set -eu
cd "$(dirname "$0")/../.."
VENV=${VENV:-.venv}
below=$("$VENV/bin/python" -c 'import site; print(site.getsitepackages()[0])')

# set_up <folder> <lists of requirements…>: packages that hide those of VENV, and nothing that VENV has.
set_up() {
  venv=$1
  shift
  stamp=$venv/.requirements
  if cat "$@" | cmp -s - "$stamp"; then return; fi
  echo "setup: making $venv" >&2
  "$VENV/bin/python" -m venv --clear "$venv"
  echo "$below" >"$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/below.pth"
  for list in "$@"; do
    "$venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps -r "$list"
  done
  cat "$@" >"$stamp"
}

set_up .venv-peers tools/requirements/peers.txt
set_up .venv-peers-before tools/requirements/peers.txt tools/requirements/peers-before.txt
.venv-peers/bin/python -m pytest -q tests/peers "$@"
.venv-peers-before/bin/python -m pytest -q tests/peers/test_trainer.py tests/peers/test_accelerate.py \
  tests/peers/test_peft.py "$@"
