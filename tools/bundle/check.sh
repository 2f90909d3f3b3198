#!/bin/sh
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# Runs the tests of what build.sh has built: those in C++ (CTEST_ARGS), then, if pytest is there, those in Python
# (PYTEST_ARGS, of the files PYTEST_FILES), and on a GPU what one can prove.
set -u
cd "$(dirname "$0")"

PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-$(env -u OMP_NUM_THREADS nproc)}
failed=0
# shellcheck disable=SC2086  # a list of words
ctest --test-dir build --output-on-failure -LE python -j "$JOBS" ${CTEST_ARGS:-} || failed=1
export PYTHONPATH="$PWD/build/python" PATH="$PWD/build/bin:$PATH"
if ! "$PYTHON" -c 'import pytest' 2>/dev/null; then
  echo "check.sh: $PYTHON has no pytest: the tests in Python did not run"
elif "$PYTHON" -c 'import xdist' 2>/dev/null; then
  # shellcheck disable=SC2086  # a list of words
  "$PYTHON" -m pytest -q -n "$JOBS" --dist worksteal ${PYTEST_ARGS:-} ${PYTEST_FILES:-tests/python} || failed=1
else
  # Without pytest-xdist each process takes every JOBS-th file.
  # shellcheck disable=SC2046,SC2086
  ls ${PYTEST_FILES:-$(find tests/python -name 'test_*.py')} >build/python-tests
  for job in $(seq "$JOBS"); do
    # shellcheck disable=SC2046,SC2086
    "$PYTHON" -m pytest -q ${PYTEST_ARGS:-} $(awk -v n="$JOBS" -v k="$job" 'NR % n == k % n' build/python-tests) \
      >"build/python-tests-$job.log" 2>&1 &
    eval "process_$job=$!"
  done
  for job in $(seq "$JOBS"); do
    eval "wait \$process_$job"
    code=$?
    [ $code = 0 ] || [ $code = 5 ] || { failed=1; cat "build/python-tests-$job.log"; }
  done
  grep -hE '^[0-9]+ (passed|failed|skipped|error)|passed in' build/python-tests-*.log
fi
if "$PYTHON" -c 'import sys, pytest, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  beside=
  "$PYTHON" -c 'import xdist' 2>/dev/null && beside="-n 8 --dist worksteal"
  # shellcheck disable=SC2046,SC2086  # lists of words
  DEEPTIDE_TEST_ACCELERATOR=cuda THOROUGH=1 "$PYTHON" -m pytest -q -rs $beside $(for name in test test_like_a_gpu \
    offload/test_offload offload/test_offload_param offload/test_placement offload/test_twin_flow; do
    echo "tests/python/accelerator/${name}_on_accelerator.py"
  done) || failed=1
fi
exit $failed
