#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Which part of the costly work is this commit's: tools/turns.py turn | tests | sanitizer | layers | few.

CI runs a third of the costly cases, and one sanitizer over a third of the layers, chosen by the number of commits: of
three runs in a row each takes another third, of six each another third or another sanitizer. What a change touched runs
whole, whatever its turn; of layers, as many again at most: those with the most changed files.

turn       prints the number of commits: a third is its remainder of 3, and files take their turns in its order
tests      prints the test files of tests/python that changed, or that read sources which did
sanitizer  prints asan or tsan
layers     prints the layers whose tests the sanitizer runs
few        prints those of them whose turn it is, without those that changed and without the engine, whose tests compile
           all of the product: what a slow machine has time for

Fixtures, CI's own script and this one belong to all tests, as much of the product does; a third of everything meets a
change of them at once, and the rest within two runs.
"""

import collections
import sys
from collections.abc import Sequence

import tidy

TURNS = 3
SANITIZERS = ("asan", "tsan")
OF_ALL_LAYERS = ("CMakeLists.txt", "cmake/")  # flags, by which any layer is built
READS_SOURCES = {"tests/python/front/test_stub.py": "python/deeptide/"}  # a test, and the sources that it reads


def main(arguments: Sequence[str]) -> int:
    """Prints what was asked for; returns the exit code."""
    answers = {
        "turn": lambda: [str(turn())],
        "tests": changed_tests,
        "sanitizer": lambda: [SANITIZERS[turn() % len(SANITIZERS)]],
        "layers": layers_of_turn,
        "few": lambda: sorted(_due(_layers()) - {"engine"}),
    }
    if len(arguments) != 1 or arguments[0] not in answers:
        print(__doc__, file=sys.stderr)
        return 2
    print(*answers[arguments[0]]())
    return 0


def turn() -> int:
    """Returns the number of commits: 0 of sources without a repository."""
    return int(tidy.git("rev-list", "--count", "HEAD", check=False) or 0)


def changed_tests() -> list[str]:
    """Returns the test files in Python that changed, or whose sources did."""
    changed = tidy.changed_files(("tests/python/", "tests/hosts/", *READS_SOURCES.values()))
    tests = {name for name in changed if name.rpartition("/")[2].startswith("test_")}
    readers = {test for test, read in READS_SOURCES.items() if any(name.startswith(read) for name in changed)}
    return sorted(tests | readers)


def layers_of_turn() -> list[str]:
    """Returns the layers with tests whose turn it is, and those that changed."""
    changed = tidy.changed_files(("src/", "tests/", *OF_ALL_LAYERS))
    layers = _layers()
    if any(name.startswith(OF_ALL_LAYERS) for name in changed):
        return layers
    due = _due(layers)
    touched = collections.Counter(layer for name in changed if (layer := name.split("/")[1]) in layers)
    most = [layer for layer, _ in touched.most_common() if layer not in due]
    return sorted(due.union(most[: len(due)]))


def _layers() -> list[str]:
    return sorted(path.parent.name for path in (tidy.ROOT / "tests").glob("*/CMakeLists.txt"))


def _due(layers: list[str]) -> set[str]:
    return {layer for number, layer in enumerate(layers) if number % TURNS == turn() % TURNS}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
