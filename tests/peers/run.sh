#!/bin/sh
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# Serves `make test-peers`: sets up .venv-peers, .venv-peers-before and .venv-peers-deepspeed, all over VENV, then
# runs the tests in the first and, with each library's last minor version before, those of libraries in the second; the
# third is what test_deepspeed*.py start DeepSpeed in. Arguments are pytest's.
set -eu
cd "$(dirname "$0")/../.."
VENV=${VENV:-.venv}
below=$("$VENV/bin/python" -c 'import site; print(site.getsitepackages()[0])')

# set_up <folder> <list of requirements>: packages that hide those of VENV, and nothing that VENV has.
set_up() {
  venv=$1 list=$2 stamp=$1/.requirements
  if cmp -s "$list" "$stamp"; then return; fi
  echo "setup: making $venv" >&2
  "$VENV/bin/python" -m venv --clear "$venv"
  echo "$below" >"$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/below.pth"
  # DeepSpeed comes as source: its build needs a recent setuptools, and asks the installed torch what to compile.
  builder=$(grep '^setuptools==' "$list" || true)
  [ -z "$builder" ] || "$venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps "$builder"
  DS_ACCELERATOR=cpu DS_BUILD_OPS=0 "$venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps \
    --no-build-isolation -r "$list"
  cp "$list" "$stamp"
}

set_up .venv-peers tools/requirements/peers.txt
set_up .venv-peers-before tools/requirements/peers-before.txt
set_up .venv-peers-deepspeed tools/requirements/peers-deepspeed.txt
.venv-peers/bin/python -m pytest -q tests/peers "$@"
.venv-peers-before/bin/python -m pytest -q tests/peers/test_trainer.py tests/peers/test_accelerate.py \
  tests/peers/test_peft.py tests/peers/test_trl.py tests/peers/test_lightning.py "$@"
