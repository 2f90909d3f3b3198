#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that each relative link in the Markdown pages leads to a file, and to a heading of it."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and most renderers derive them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    titles = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in HEADING.findall(text))
    return {NOT_IN_ANCHORS.sub("", title.lower()).strip().replace(" ", "-") for title in titles}


def problems_of(page: Path) -> list[str]:
    """A line per dead link of `page`."""
    found = []
    text = FENCED.sub(lambda block: "\n" * block[0].count("\n"), page.read_text(encoding="utf-8"))
    for match in LINK.finditer(text):
        where = f"{page}:{text.count(chr(10), 0, match.start()) + 1}"
        target = page.parent / match[1] if match[1] else page
        if not target.exists():
            found.append(f"{where}: {match[1]} is not there")
        elif match[2] and target.suffix == ".md" and match[2] not in anchors(target.resolve()):
            found.append(f"{where}: {target} has no heading #{match[2]}")
    return found


def main() -> int:
    pages = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    problems = [problem for page in pages if Path(page).exists() for problem in problems_of(Path(page))]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
