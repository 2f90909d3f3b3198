#!/bin/sh
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# The demo: two ranks teach a byte-level GPT to write Python under ZeRO-3. `make demo` sets up what it needs and runs it.
#   DATA=path   learn from this file or folder instead     RESUME=1   continue from the newest checkpoint
#   OUT=folder  losses, curve, checkpoints (runs/demo)     RANKS=n    ranks (2)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
python=${PYTHON:-$root/.venv/bin/python}
launcher=${LAUNCHER:-$root/.venv/bin/deeptide}

# bf16 halves what moves, but a processor without bf16 arithmetic emulates it, slowly.
config=$here/gpt/ds_config_fp32.json
if grep -qwE 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo || [ -e /dev/nvidia0 ]; then
  config=$here/gpt/ds_config.json
fi

set -- --config "$config" --out "${OUT:-runs/demo}" --minutes 5
[ -z "${DATA:-}" ] || set -- "$@" --data "$DATA"
[ "${RESUME:-0}" != 1 ] || set -- "$@" --resume
code=0
"$launcher" --quiet --num_ranks "${RANKS:-2}" --grace 60 --python "$python" "$here/gpt/gpt.py" "$@" || code=$?
[ $code -ne 0 ] || "$python" -m deeptide._commands.report "${OUT:-runs/demo}" | sed 's/^/Report: /'
exit $code
