#!/bin/sh
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# The demo of a model larger than memory: a few steps of a GPT whose state lies in files. `make demo-large` runs it.
#   SIZE=300M|1B|3B  parameters (1B)      FILES=folder  on a fast drive, 18 bytes a parameter (runs/large)
#   STEPS=n          (4)                  RANKS=n       (2)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
python=${PYTHON:-$root/.venv/bin/python}
launcher=${LAUNCHER:-$root/.venv/bin/deeptide}

set -- --size "${SIZE:-1B}" --files "${FILES:-runs/large}" --steps "${STEPS:-4}"
# A processor without bf16 arithmetic emulates it, slowly.
if ! grep -qwE 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo; then set -- "$@" --fp32; fi
exec "$launcher" --quiet --num_ranks "${RANKS:-2}" --python "$python" "$here/gpt/large.py" "$@"
