# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`deeptide bench comm` with real ranks of this machine; no time is judged."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import deeptide

COLLECTIVES = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast"]
QUICK = ("--trials", "2", "--warmups", "1")


def bench(*words):
    command = shutil.which("deeptide")
    if not command:
        pytest.skip("the deeptide command is not in PATH")
    package = os.path.dirname(os.path.dirname(deeptide.__file__))
    path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [command, "bench", "comm", "-q", "--python", sys.executable, *QUICK, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("path", ["shared memory", "c10d"])
@pytest.mark.slow
def test_every_collective_is_measured_as_nccl_tests_count(path):
    done = bench("--json", "--num_ranks", "3", "--maxsize", "16K", *(["--c10d"] if path == "c10d" else []))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    # Rounded down to whole cache lines for each of the three ranks.
    assert [(row["collective"], row["bytes"]) for row in rows] == [
        (name, size) for name in COLLECTIVES for size in (4032, 16320)
    ]
    for row in rows:
        assert (row["ranks"], row["hosts"], row["path"], row["dtype"]) == (3, 1, path, "fp32")
        assert 0 < row["best_us"] <= row["median_us"]
        assert row["algbw"] == pytest.approx(row["bytes"] / row["median_us"] / 1e3)
        factor = {"all-reduce": 4 / 3, "broadcast": 1}.get(row["collective"], 2 / 3)
        assert row["busbw"] == pytest.approx(row["algbw"] * factor)


@pytest.mark.slow
def test_table_is_for_people_and_raw_for_spreadsheets():
    words = ("--all-gather", "--minsize", "64K", "--maxsize", "64K", "--dtype", "bf16")
    done = bench(*words)
    assert done.returncode == 0, done.stderr
    blank, head, names, row = done.stdout.splitlines()
    assert (blank, head) == ("", "all-gather, 2 ranks on 1 host, bf16, shared memory")
    assert names.split() == ["size", "best", "median", "algbw", "GBps", "busbw", "GBps"]
    assert re.fullmatch(r" +64 KiB +[0-9.]+ [um]?s +[0-9.]+ [um]?s +[0-9.e+]+ +[0-9.e+]+", row)
    done = bench(*words, "--raw", "--bw-unit", "Gbps")
    size, best, middle, algorithm, bus = map(float, done.stdout.splitlines()[-1].split())
    assert size == 65536
    assert 0 < best <= middle
    # Printed with two decimals and three digits.
    assert algorithm == pytest.approx(size * 8 / middle / 1e3, rel=0.01)
    assert bus == pytest.approx(algorithm / 2, rel=0.01)


@pytest.mark.costly
def test_one_rank_alone_is_an_error():
    done = bench("--num_ranks", "1")
    assert done.returncode == 1
    assert "needs 2 ranks or more, got 1" in done.stderr
