# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The command for a GPU's first ten minutes: parts end by their limits, and each has one line whatever it does."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools" / "gpu"
pytestmark = pytest.mark.skipif(not TOOLS.is_dir(), reason="the tools are not here")


@pytest.fixture
def minutes(monkeypatch):
    for folder in (TOOLS, TOOLS.parents[1] / "bench"):
        monkeypatch.syspath_prepend(str(folder))
    import first_ten_minutes
    import plan

    return first_ten_minutes, plan


def part(plan, *scripts, skipped=""):
    commands = [plan.Command(f"c{i}", ["sh", "-c", script]) for i, script in enumerate(scripts)]
    return plan.Part("probe", 30, commands, skipped)


def timeless(line):
    return re.sub(r"\d+ s\b", "N s", line)


def test_a_part_says_how_it_ended(minutes, tmp_path):
    first, plan = minutes
    scripts = ("echo 3 kernels; echo", "echo no; exit 7", "true")
    said = [timeless(first.run_part(part(plan, script), 10, tmp_path)) for script in scripts]
    assert said == ["probe: ok, N s: 3 kernels", "probe: failed (7), N s: no", "probe: ok, N s: it printed nothing"]
    assert first.run_part(part(plan, "exit 1", skipped="no GPU"), 10, tmp_path) == "probe: skipped, no GPU"
    both = timeless(first.run_part(part(plan, "true", "echo why >&2; exit 2"), 10, tmp_path))
    assert both == "probe: 1 of 2 ok, N s\n  c1 failed (2): why"


def test_a_part_ends_by_its_limit_with_all_that_it_started(minutes, tmp_path):
    first, plan = minutes
    begun = time.monotonic()
    line = first.run_part(part(plan, f"sleep 60 & echo $! >{tmp_path}/pid; echo begun; wait"), 0.5, tmp_path)
    assert line.startswith("probe: ran into its limit of 0 s") and line.endswith(": begun")
    assert time.monotonic() - begun < 10
    child = int((tmp_path / "pid").read_text())
    for _ in range(100):  # its parent is gone, so nobody of ours reaps it
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or ") Z" in state.read_text():
            return
        time.sleep(0.05)
    pytest.fail("what the part had started goes on")


def test_speed_is_told_by_contender(minutes, tmp_path):
    _, plan = minutes
    jobs = [
        {"contender": "torch-masters", "jobs": [{"seconds": [0.3, 0.1, 0.2]}]},
        {"contender": "deeptide-0", "jobs": [{"error": "out of memory"}]},
    ]
    (tmp_path / "speed.json").write_text(json.dumps({"jobs": jobs}))
    assert plan._tell_speed(tmp_path) == "torch-masters 200.0 ms, deeptide-0 out of memory"


@pytest.mark.costly
def test_the_command_writes_a_line_for_each_part(tmp_path):
    words = [TOOLS / "first_ten_minutes.py", "--built", "--out", tmp_path, "--only", "build", "profile"]
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "lines.txt").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("0:00 build: skipped, ")
    assert lines[1].endswith("profile: skipped, torch finds no GPU here")


def test_the_profile_finds_gaps(minutes):
    import profile_step

    spans = [(0.0, 10.0, "a"), (5.0, 30.0, "b"), (100.0, 5.0, "c"), (110.0, 1.0, "d")]
    assert profile_step.gaps_of(spans) == [(65.0, "b", "c")]
