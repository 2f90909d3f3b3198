#!/bin/sh
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# Builds Deeptide from this folder alone, against the torch of $PYTHON (python3), into build/. Arguments go to CMake;
# TARGET builds one target alone.
set -eu
cd "$(dirname "$0")"

PYTHON=${PYTHON:-python3}
PYTHON=$(command -v "$PYTHON") || { echo "build.sh: no $PYTHON here; set PYTHON" >&2; exit 1; }
for program in cmake ninja c++; do
  command -v $program >/dev/null || { echo "build.sh: $program is missing" >&2; exit 1; }
done
"$PYTHON" -c 'import torch' || { echo "build.sh: $PYTHON has no torch; set PYTHON to one that has" >&2; exit 1; }

cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DDEEPTIDE_UNITY=ON -DDEEPTIDE_EXAMPLES=OFF \
  -DPython3_EXECUTABLE="$PYTHON" -DCMAKE_PREFIX_PATH="$PWD/third_party/usr" "$@"
cmake --build build -j "${JOBS:-$(tools/jobs.sh)}" ${TARGET:+--target "$TARGET"}
echo "built: PYTHONPATH=$PWD/build/python, command $PWD/build/bin/deeptide"
