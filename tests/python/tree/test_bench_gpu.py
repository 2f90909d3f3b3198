# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark for GPUs, on a CPU: what stands beside the engine computes what the engine does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
pytestmark = pytest.mark.skipif(not BENCH.is_dir(), reason="the benchmarks are not here")


@pytest.mark.slow
def test_torch_with_fp32_masters_trains_as_the_engine_does(tmp_path):
    words = ["--device", "cpu", "--model", "tiny", "--only", "torch-masters", "deeptide-0"]
    lengths = ["--rounds", 1, "--warmup", 2, "--steps", 8]
    report = ["--json", tmp_path / "gpu.json", "--output", tmp_path / "gpu.md"]
    command = [sys.executable, BENCH, "gpu", *words, *lengths, *report]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    results = {line["contender"]: line["jobs"][0] for line in json.loads((tmp_path / "gpu.json").read_text())["jobs"]}
    torch, ours = results["torch-masters"]["loss"], results["deeptide-0"]["loss"]
    assert ours < 6.2  # from ln 512 = 6.24 on: ten steps have moved it
    assert torch == pytest.approx(ours, abs=2e-3)
    rows = [line for line in (tmp_path / "gpu.md").read_text().splitlines() if line.startswith("| torch-masters")]
    assert "| 1.000 |" in rows[0]  # of its own step: it is the baseline
