# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""No text that reaches a user says INTERNAL ASSERT: sources use none of torch's assertions, and tests notice one."""

import re
from pathlib import Path

import pytest
from conftest import run_processes

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [p for room in ("src", "python", "include") for p in sorted((ROOT / room).rglob("*")) if p.is_file()]
ASSERTION = re.compile(r"(TORCH|C10|AT)_?INTERNAL_ASSERT|\bAT_ASSERT|TORCH_CHECK_INDEX_ASSERT|INTERNAL ASSERT")


def test_sources_use_deeptides_own_invariants():
    assert len(SOURCES) > 300
    assert ASSERTION.search("TORCH_INTERNAL_ASSERT(x)") and ASSERTION.search("AT_ASSERTM(x)")
    found = [p for p in SOURCES if p.suffix in (".cc", ".h", ".inl", ".cu", ".py") and ASSERTION.search(p.read_text())]
    assert not found


def raise_an_assertion():
    raise RuntimeError("x INTERNAL ASSERT FAILED at y")


def notices(work):
    """Whether an AssertionError ends `work`; pytest.raises would notice that one, too."""
    try:
        work()
    except AssertionError:
        return True
    return False


def test_an_assertion_that_a_test_expects_is_noticed():
    def expects():
        with pytest.raises(RuntimeError):
            raise_an_assertion()

    assert notices(expects)


def test_an_assertion_that_a_process_prints_is_noticed():
    assert notices(lambda: run_processes(1, raise_an_assertion, check=False))
