# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`deeptide explain "MESSAGE"`: prints what the documentation says about an error or a warning."""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "troubleshooting.md"
_HOLE = "…"
_OF_TEXTS = 0.3  # the weight of a word in a heading's text beside one in its title


@dataclass(frozen=True)
class Heading:
    """One heading of the page: the parts of messages that lead to it, and its text."""

    title: str
    parts: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Match:
    """A heading with the part that led to it, and how much of the message its words are."""

    heading: Heading
    part: str
    length: tuple[int, int]  # of the longest words between two values, and of all


def read_headings(page: str) -> list[Heading]:
    """Reads the page's Markdown. A title in quotes is a part of a message; a block of `text` below it lists more."""
    headings = []
    for section in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        title, _, text = re.split(r"^## ", section, maxsplit=1, flags=re.MULTILINE)[0].partition("\n")
        parts = re.findall(r'^"(.*)"$', title)
        block = re.match(r"\s*```text\n(.*?)```\n", text, re.DOTALL)
        if block:
            parts += block[1].splitlines()
            text = text[block.end() :]
        headings.append(Heading(title, tuple(parts), text.strip()))
    return headings


def _words(text: str) -> str:
    return " ".join(text.split())


@functools.cache
def pattern_of(part: str) -> re.Pattern[str]:
    """Matches a message with any values where `part` has a `…`."""
    return re.compile(".*?".join(re.escape(word) for word in _words(part).split(_HOLE)))


def match(headings: list[Heading], message: str) -> Match | None:
    """The heading with the longest words of the message. None: no heading has this message."""
    text = _words(message)
    found = [
        Match(heading, part, (max(map(len, part.split(_HOLE))), len(part)))
        for heading in headings
        for part in heading.parts
        if pattern_of(part).search(text)
    ]
    return max(found, key=lambda match: match.length, default=None)


def nearest(headings: list[Heading], message: str, count: int = 3) -> list[str]:
    """The titles of the headings that share most words with the message. Rare words count more, those of texts less."""
    titles = [_terms(" ".join([heading.title, *heading.parts])) for heading in headings]
    texts = [_terms(heading.text) for heading in headings]
    wanted = _terms(message)

    def weight(words: set[str], among: list[set[str]]) -> float:
        return sum(math.log(len(among) / sum(word in each for each in among)) for word in words)

    scores = [
        weight(wanted & title, titles) + _OF_TEXTS * weight(wanted & text, texts)
        for title, text in zip(titles, texts, strict=True)
    ]
    best = sorted(range(len(headings)), key=lambda index: -scores[index])[:count]
    return [headings[index].title for index in best if scores[index] > 1.0]


def _terms(text: str) -> set[str]:
    return set(re.findall(r"[a-z_]{3,}", text.lower()))


def explain(message: str) -> str | None:
    """The heading of a message with its text."""
    found = match(read_headings(PAGE.read_text(encoding="utf-8")), message)
    return f"{found.heading.title}\n\n{found.heading.text}" if found else None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="deeptide explain", description="Prints what docs/troubleshooting.md says about an error or a warning."
    )
    parser.add_argument("message", nargs="*", help="the message or a part of it; standard input without one")
    given = parser.parse_args().message
    message = " ".join(given) if given else sys.stdin.read()
    text = explain(message)
    if text is None:
        print("deeptide explain: no heading has these words; quote a part of the message that has no values in it")
        if near := nearest(read_headings(PAGE.read_text(encoding="utf-8")), message):
            print("nearest:", *near, sep="\n  ")
        return 1
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
