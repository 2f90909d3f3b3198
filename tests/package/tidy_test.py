# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Which files tools/tidy.py takes for changed in any kind of clone, and in which translation units it checks them."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import tidy


def git(folder: Path, *args: str) -> None:
    settings = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *settings, *args], cwd=folder, check=True, capture_output=True)


class Tidy(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve() / "tree"
        self.root.mkdir()
        self.use(self.root)
        git(self.root, "init")
        self.commit("src/base/old.cc", "src/base/old.h", "tests/old_test.cc")
        self.commit("src/base/new.cc", "README.md")

    def use(self, root: Path):
        patch = mock.patch.object(tidy, "ROOT", root)
        patch.start()
        self.addCleanup(patch.stop)

    def commit(self, *names: str, text: str = ""):
        for name in names:
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + name)
        git(self.root, "add", ".")
        git(self.root, "commit", "-m", "x")

    def test_takes_what_a_branch_changed(self):
        git(self.root, "checkout", "-b", "mine")
        self.commit("src/base/mine.cc")
        (self.root / "src/base/old.cc").write_text("edited, not committed")
        (self.root / "src/base/unknown.cc").write_text("new, not added")
        self.assertEqual(sorted(tidy.changed_files()), [f"src/base/{name}.cc" for name in ("mine", "old", "unknown")])

    def test_takes_the_last_commits_newest_first_on_the_main_branch(self):
        self.assertEqual(tidy.changed_files()[0], "src/base/new.cc")
        self.assertEqual(sorted(tidy.changed_files()), ["src/base/new.cc", "src/base/old.cc", "src/base/old.h"])

    def test_leaves_out_what_was_deleted(self):
        git(self.root, "rm", "src/base/new.cc")
        git(self.root, "commit", "-m", "x")
        self.assertNotIn("src/base/new.cc", tidy.changed_files())

    def test_takes_every_file_of_a_clone_of_one_commit(self):
        clone = self.root.parent / "clone"
        git(self.root.parent, "clone", "--depth", "1", f"file://{self.root}", str(clone))
        self.use(clone)
        self.assertEqual(sorted(tidy.changed_files()), ["src/base/new.cc", "src/base/old.cc", "src/base/old.h"])

    def test_orders_the_files_of_a_large_commit_anew_for_every_head(self):
        names = [f"src/base/f{i}.cc" for i in range(20)]
        self.commit(*names)
        first = tidy.changed_files()[:20]
        git(self.root, "commit", "--amend", "-m", "y")
        self.assertEqual(sorted(first), sorted(names))
        self.assertNotEqual(first, tidy.changed_files()[:20])

    def test_finds_the_unit_of_a_source_and_of_a_header(self):
        build = self.root / "build"
        unity = build / "Unity/unity_0_cxx.cxx"
        unity.parent.mkdir(parents=True)
        unity.write_text('#include "src/base/new.cc"\n#include "src/base/old.cc"\n')
        self.commit("src/base/user.cc", text='#include "base/lone.h"\n')
        self.commit("src/base/lone.h", "tests/some_test.cc")
        entries = [
            {"file": str(path)} for path in (unity, self.root / "src/base/user.cc", self.root / "tests/some_test.cc")
        ]
        (build / "compile_commands.json").write_text(json.dumps(entries))
        units = tidy.units_of(build)
        user = self.root / "src/base/user.cc"
        self.assertEqual(units, {unity: ["src/base/new.cc", "src/base/old.cc"], user: ["src/base/user.cc"]})
        self.assertEqual(tidy.units_for(["src/base/old.h", "src/base/new.cc"], units), [unity])
        self.assertEqual(tidy.units_for(["src/base/lone.h", "src/base/nowhere.h"], units), [user])

    def test_fails_for_errors_in_the_files_and_in_no_neighbour(self):
        files = {"src/base/old.cc"}
        mine, neighbour = (f"{self.root}/src/base/{name}.cc:1:2: error: x" for name in ("old", "new"))
        torch = "/usr/include/torch.h:3:4: fatal error: y"
        of_others = [tidy.is_of_others(line, files) for line in tidy.errors_in("\n".join((mine, neighbour, torch)))]
        self.assertEqual(of_others, [False, True, False])
        self.assertFalse(all(tidy.is_of_others(line, files) for line in tidy.errors_in("Segmentation fault")))


if __name__ == "__main__":
    unittest.main()
