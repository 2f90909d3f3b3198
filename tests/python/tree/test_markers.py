# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Tests run as they are marked: ranks `apart` share no memory, and a slow test runs where it is named."""

import re
import subprocess
import sys
from pathlib import Path

import edges
import pytest
from conftest import run_ranks

ROOT = Path(__file__).resolve().parents[3]


def _summary(world):
    engine = edges.start(world)
    text = engine._core.summary()
    engine.destroy()
    return text


@pytest.mark.both_ways
def test_both_ways_means_shared_and_apart(request):
    apart = request.node.callspec.params["_memory"] == "apart"
    text = run_ranks(2, _summary)[0]
    assert ("no two ranks share memory" in text) == apart, text


@pytest.mark.apart
def test_apart_means_no_shared_memory():
    assert "no two ranks share memory" in run_ranks(2, _summary)[0]


@pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="a bundle has no Makefile")
def test_tests_that_the_makefile_names_would_run():
    named = re.findall(r"tests/\S+\.py::\w+", (ROOT / "Makefile").read_text())
    assert named
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *named]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{len(named)} tests collected" in done.stdout.replace("1 test c", "1 tests c")
