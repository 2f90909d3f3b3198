# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The data of `make mutations` fits the tree: each replacement has its place, and its tests exist."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools" / "mutations"))

from faults import FAULTS  # noqa: E402
from mends import MENDS  # noqa: E402


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place_and_its_tests(fault):
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == 1 and fault.new != fault.old
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).is_file()


def test_the_faults_are_twelve_kinds():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 12


@pytest.mark.parametrize("mend", MENDS, ids=lambda mend: mend.name)
def test_a_mend_has_its_place(mend):
    assert (ROOT / mend.file).read_text().count(mend.old) == 1 and mend.new != mend.old
