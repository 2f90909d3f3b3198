# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md quotes what the program says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"
OF_OTHERS = {"No package metadata was found for deepspeed"}  # importlib's


def words_of_the_program():
    """All text of the sources, without what a compiler or Python removes between the parts of a message."""
    folders = (ROOT / "src", ROOT / "python")
    files = [p for folder in folders for p in folder.rglob("*") if p.suffix in {".cc", ".h", ".py"}]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(files))
    return re.sub(r'"\s*(?:f?"|R"\()', "", text)


@pytest.mark.skipif(not PAGE.exists(), reason="a bundle leaves the page out")
def test_each_message_is_one_that_the_program_gives():
    titles = re.findall(r'^### "(.*)"$', PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(titles) > 10
    words = words_of_the_program()
    assert [title for title in titles if title not in OF_OTHERS and title not in words] == []
