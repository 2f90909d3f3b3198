# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The archive for machines without a network: unpacked in a folder of its own, it builds itself and what it built runs.

Run as: bundle_test.py <archive> [--whole], by the Python of an environment that has torch. `make test-bundle` writes
the archive and runs all of it. Without --whole only the command is compiled, in a minute instead of ten, as in CI.
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path()
WHOLE = "--whole" in sys.argv
# The names in CMake's cache for the folder of each package that the bundle brings along.
BROUGHT = ("nlohmann_json_DIR", "CLI11_DIR", "spdlog_DIR", "fmt_DIR", "HWY_DIR", "DEEPTIDE_GLOO_INCLUDE")
BROUGHT += ("DEEPTIDE_URING_LIBRARY", *(("GTest_DIR",) if WHOLE else ()))
PLAN_CONFIG = '{"train_batch_size": 8, "zero_optimization": {"stage": 3}}'
# The files that check.sh runs in Python: plans, messages, the interface of DeepSpeed.
FILES = ("engine/plan/test_plan", "front/test_messages", "as_deepspeed/test_as_deepspeed")
CUT = " ".join(f"tests/python/{name}.py" for name in FILES)


class Bundle(unittest.TestCase):
    """One folder for all tests, outside the tree, with no variable that names the tree."""

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory(prefix="deeptide-bundle-")
        cls.addClassCleanup(folder.cleanup)
        subprocess.run(["tar", "--extract", "--xz", "--file", str(ARCHIVE), "--directory", folder.name], check=True)
        (cls.root,) = Path(folder.name).iterdir()
        options = () if WHOLE else ("-DDEEPTIDE_TESTS=OFF",)
        cls.run_in("./build.sh", *options, TARGET="" if WHOLE else "deeptide_command")

    @classmethod
    def run_in(cls, *words: str, limit: float = 3600, **more: str) -> str:
        """Runs a program in the bundle's folder; returns its output."""
        kept = {name: os.environ[name] for name in os.environ if name.startswith("CCACHE_") or name in ("HOME", "JOBS")}
        tools = os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"])  # CMake and Ninja are there
        variables = {"PATH": tools, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **kept, **more}
        variables["CCACHE_BASEDIR"] = str(cls.root)  # the folder is another each time; its paths from within are not
        done = subprocess.run(
            words,
            env=variables,
            cwd=cls.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )
        if done.returncode:
            raise AssertionError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-8000:]}")
        return done.stdout

    def run_job(self, *words: str) -> str:
        launch = ("build/bin/deeptide", "--quiet", "--num_ranks", "2", "--python", sys.executable)
        return self.run_in(*launch, *words, PYTHONPATH=str(self.root / "build" / "python"), limit=200)

    def test_packages_come_from_the_bundle(self) -> None:
        cache = (self.root / "build" / "CMakeCache.txt").read_text(encoding="utf-8")
        inside = str(self.root / "third_party")
        for name in BROUGHT:
            with self.subTest(name):
                place = re.search(rf"^{name}:[A-Z]+=(.*)$", cache, re.MULTILINE)
                self.assertIsNotNone(place, cache)
                self.assertTrue(place[1].startswith(inside), place[0])

    def test_archive_holds_what_git_does_and_nothing_that_leads_outside(self) -> None:
        outside = [
            path for path in self.root.rglob("*") if path.is_symlink() and not path.resolve().is_relative_to(self.root)
        ]
        self.assertEqual([path for path in outside if "build" not in path.relative_to(self.root).parts], [])
        for name in ("README.md", "LICENSE", "docs/config.md", "examples/quickstart.py", "src/bench/CMakeLists.txt"):
            self.assertTrue((self.root / name).is_file(), name)
        self.assertFalse((self.root / ".git").exists())

    def test_command_starts_ranks(self) -> None:
        self.assertIn("0.", self.run_in("build/bin/deeptide", "--version"))
        (self.root / "ranks.py").write_text("import os; print('rank', os.environ['RANK'], 'runs', flush=True)")
        ranks = re.findall(r"rank (\d) runs", self.run_job("ranks.py"))
        self.assertEqual(sorted(ranks), ["0", "1"])

    @unittest.skipUnless(WHOLE, "the library is not compiled")
    def test_quickstart_trains(self) -> None:
        losses = [float(x) for x in re.findall(r"loss ([0-9.e-]+)", self.run_job("examples/quickstart.py"))]
        self.assertEqual(len(losses), 10)
        self.assertLess(losses[-1], losses[0] / 2)

    @unittest.skipUnless(WHOLE, "the library is not compiled")
    def test_plan_needs_no_model(self) -> None:
        (self.root / "ds_config.json").write_text(PLAN_CONFIG, encoding="utf-8")
        words = ("plan", "--config", "ds_config.json", "--params", "7B", "--layers", "32", "--num_ranks", "8")
        output = self.run_in("build/bin/deeptide", *words, PYTHONPATH=str(self.root / "build" / "python"), limit=200)
        self.assertRegex(output, r"optimizer states +[0-9.,]+ +[KMG]iB")

    @unittest.skipUnless(WHOLE, "the tests are not compiled")
    def test_its_own_tests_pass(self) -> None:
        """check.sh on a cut: each C++ program's tests that start no process, and three files in Python."""
        self.run_in("./check.sh", CTEST_ARGS="-L unit", PYTEST_ARGS="", PYTEST_FILES=CUT)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
