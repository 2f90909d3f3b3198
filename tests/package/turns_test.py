# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Which tests and layers tools/turns.py gives a commit: a third each, and whole what changed."""

import contextlib
import io
import sys
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import turns


class Turns(unittest.TestCase):
    def given(self, changed: list[str], commits: int = 0):
        """The tree as it is, with other changes and another number of commits."""
        for attribute, value in (
            ("changed_files", lambda folders: [name for name in changed if name.startswith(folders)]),
            ("git", lambda *args, **_: str(commits)),
        ):
            patch = mock.patch.object(turns.tidy, attribute, value)
            patch.start()
            self.addCleanup(patch.stop)

    def layers(self, changed: list[str], commits: int = 0) -> set[str]:
        self.given(changed, commits)
        return set(turns.layers_of_turn())

    def test_of_three_commits_in_a_row_cover_all_layers_and_share_none(self):
        parts = [self.layers([], commits) for commits in (7, 8, 9)]
        built = {path.parent.name for path in (turns.tidy.ROOT / "tests").glob("*/CMakeLists.txt")}
        self.assertEqual(set().union(*parts), built)
        self.assertEqual(sum(map(len, parts)), len(built))

    def test_of_six_commits_in_a_row_show_every_layer_to_both_sanitizers(self):
        shown = set()
        for commits in range(8, 14):
            due = self.layers([], commits)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                self.assertEqual(turns.main(["sanitizer"]), 0)
            shown.update((out.getvalue().strip(), layer) for layer in due)
        built = {path.parent.name for path in (turns.tidy.ROOT / "tests").glob("*/CMakeLists.txt")}
        self.assertEqual(shown, {(sanitizer, layer) for sanitizer in ("asan", "tsan") for layer in built})

    def test_are_whole_for_what_changed(self):
        for commits in range(3):
            for name in ("src/comm/group.cc", "tests/comm/group_test.cc"):
                self.assertIn("comm", self.layers([name], commits))
        hosts = "tests/hosts/training/test_hangs.py"
        self.given(["tests/python/engine/plan/test_plan.py", "tests/python/models.py", "src/base/json.cc", hosts])
        self.assertEqual(turns.changed_tests(), [hosts, "tests/python/engine/plan/test_plan.py"])

    def test_are_as_many_again_at_most_of_many_that_changed(self):
        due = self.layers([])
        built = sorted(path.parent.name for path in (turns.tidy.ROOT / "tests").glob("*/CMakeLists.txt"))
        most = next(layer for layer in built if layer not in due)
        layers = self.layers([f"src/{layer}/one.cc" for layer in built] + [f"src/{most}/other.cc"])
        self.assertEqual(len(layers), 2 * len(due))
        self.assertLessEqual(due | {most}, layers)

    def test_are_all_layers_where_flags_changed(self):
        built = {path.parent.name for path in (turns.tidy.ROOT / "tests").glob("*/CMakeLists.txt")}
        for name in ("cmake/DeeptideLayer.cmake", "CMakeLists.txt"):
            self.assertEqual(self.layers([name]), built)
        self.assertNotEqual(self.layers([".ci/run"]), built)


if __name__ == "__main__":
    unittest.main()
