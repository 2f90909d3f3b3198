#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Puts one deliberate fault after the other into a copy of the tree and shows which tests notice.

python tools/mutations/run.py --build build [name …]: the faults of faults.py, or those whose names hold a given text.
Exits with 1 if a fault survives one of its tests, or with --baseline if such a test fails without any fault.
With --mends it takes out the mends of mends.py instead, and the fuzzer of models must find each: by the seed that is
known to show it, or with --search by a campaign.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faults import FAULTS
from mends import MENDS

ROOT = Path(__file__).resolve().parents[2]
COMPILED = ("src/", "include/", "python/src/")
TEST_SECONDS = 900
SEARCH_SECONDS, SEARCH_SEED = 600, 7000  # of a campaign, and where it begins


def is_compiled(fault):
    return fault.file.startswith(COMPILED)


def copy_tree(copy):
    """The files that git would have, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


class Tree:
    """A copy of the tree. Its package takes its compiled parts from `build` until one of them is mutated."""

    def __init__(self, copy, build):
        self.copy, self.build = copy, build.resolve()
        copy_tree(copy)
        self._borrow()

    def _borrow(self):
        """The package's Python files are links into a tree: here into the copy."""
        self.package = self.copy / "borrowed"
        shutil.copytree(self.build / "python", self.package, symlinks=True)
        for path in self.package.rglob("*"):
            if path.is_symlink() and path.resolve().is_relative_to(ROOT / "python"):
                target = self.copy / path.resolve().relative_to(ROOT)
                path.unlink()
                path.symlink_to(target)
        self.commands = self.build / "bin"

    def compile(self):
        """Builds the copy with what its compiler cache has of the tree itself."""
        own, command = self.copy / "build", shutil.which("cmake") or "cmake"
        environment = {**os.environ, "CCACHE_BASEDIR": str(self.copy), "CCACHE_NOHASHDIR": "1"}
        if not own.is_dir():
            options = [f"-DPython3_EXECUTABLE={sys.executable}", "-DDEEPTIDE_UNITY=ON", "-DDEEPTIDE_TESTS=OFF"]
            made = [command, "--preset", "dev", "-B", str(own), *options, "-DDEEPTIDE_EXAMPLES=OFF"]
            subprocess.run(made, cwd=self.copy, env=environment, stdout=subprocess.DEVNULL, check=True)
        built = [command, "--build", str(own), "--target", "deeptide_product", "-j", str(os.cpu_count() or 1)]
        subprocess.run(built, cwd=self.copy, env=environment, stdout=subprocess.DEVNULL, check=True)
        self.package, self.commands = own / "python", own / "bin"

    def passes(self, test, case_limit):
        """Whether the test passes; None if it did not end in time. case_limit: how many failures end it."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.package),
            "PATH": f"{self.commands}{os.pathsep}{os.environ['PATH']}",
        }
        asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--maxfail={case_limit}", test]
        try:
            result = subprocess.run(
                asked,
                cwd=self.copy,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=TEST_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return None
        told = result.stdout.decode(errors="replace")
        if result.returncode not in (0, 1) and "\nFAILED " not in told:  # no such test, or the collection failed
            raise SystemExit(f"{test}: pytest ended with {result.returncode}\n{told[-2000:]}")
        return result.returncode == 0

    def fuzz(self, seed, having=()):
        """(the first seed whose program fails, how): of this one, or of a campaign where it is None; else None."""
        asked = [sys.executable, "tests/fuzz", "--models", "--first", "--shrink", "0", "--jobs", "1"]
        asked += ["--seconds", str(SEARCH_SECONDS), "--seed", str(SEARCH_SEED if seed is None else seed)]
        asked += ["--having", *having] if seed is None else ["--programs", "1"]
        environment = {**os.environ, "PYTHONPATH": str(self.package)}
        result = subprocess.run(asked, cwd=self.copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        told = result.stdout.decode(errors="replace")
        found = re.search(r"=== seed (\d+), \d+ s: (.*)", told)
        if found is None and "fuzz: " not in told:
            raise SystemExit(f"the fuzzer ended with {result.returncode}\n{told[-2000:]}")
        return found and (int(found[1]), found[2][:80])


def try_mend(tree, mend, search):
    """Whether the fuzzer finds a model that trains to other numbers without it. Prints what it found."""
    started = time.monotonic()
    found = with_fault(tree, mend, lambda: tree.fuzz(None if search else mend.seed, mend.having))
    word = f"seed {found[0]}: {found[1]}" if found else "NOT FOUND"
    print(f"{mend.name:60} {time.monotonic() - started:4.0f} s  {word}", flush=True)
    return bool(found)


def try_fault(tree, fault):
    """{test: whether it passes, None where it did not end}."""
    return with_fault(tree, fault, lambda: {test: tree.passes(test, case_limit=1) for test in fault.tests})


def with_fault(tree, fault, look):
    """Returns look(), called while the fault is in the copy."""
    path = tree.copy / fault.file
    whole = path.read_text()
    if whole.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: {fault.file} has the old text {whole.count(fault.old)} times, expected once")
    path.write_text(whole.replace(fault.old, fault.new))
    try:
        if is_compiled(fault):
            tree.compile()
        return look()
    finally:
        path.write_text(whole)


def _put_in(tree, chosen, options):
    """Returns the faults that no test noticed, and tests that fail without a fault."""
    survived = []
    for test in dict.fromkeys(test for fault in chosen for test in fault.tests if options.baseline):
        if tree.passes(test, case_limit=1) is not True:
            survived.append(f"{test} fails without any fault")
            print(survived[-1], flush=True)
    for fault in chosen:
        started = time.monotonic()
        for test, passed in try_fault(tree, fault).items():
            word = {False: "noticed ", True: "SURVIVED", None: "NO END  "}[passed]
            print(f"{word}  {fault.name:40} {time.monotonic() - started:4.0f} s  {test}", flush=True)
            survived += [] if passed is False else [fault.name]
    return survived


def _take_out(tree, chosen, options):
    """The mends without which the fuzzer found nothing, or whose program fails with them."""
    survived = []
    for seed in dict.fromkeys(mend.seed for mend in chosen if options.baseline):
        if tree.fuzz(seed):
            survived.append(f"the program of seed {seed} fails as the tree is")
            print(survived[-1], flush=True)
    return survived + [mend.name for mend in chosen if not try_mend(tree, mend, options.search)]


def main():
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="a build of the tree; default: build")
    parser.add_argument("--python-only", action="store_true", help="only faults that need no compiler")
    parser.add_argument("--baseline", action="store_true", help="first run the tests without a fault")
    parser.add_argument("names", nargs="*", help="parts of the names of faults; default: all")
    parser.add_argument("--mends", action="store_true", help="the fuzzer's share, not the tests'")
    parser.add_argument("--search", action="store_true", help="of it: from one seed on, ten minutes for each mend")
    options = parser.parse_args()
    known = MENDS if options.mends else FAULTS
    chosen = [each for each in known if not options.names or any(part in each.name for part in options.names)]
    chosen = sorted((each for each in chosen if not (options.python_only and is_compiled(each))), key=is_compiled)
    with tempfile.TemporaryDirectory(prefix="deeptide-mutations-") as folder:
        tree = Tree(Path(folder), options.build)
        survived = (_take_out if options.mends else _put_in)(tree, chosen, options)
    print(
        f"{len(chosen)} faults, {len(survived)} of them unnoticed" if survived else f"{len(chosen)} faults, all noticed"
    )
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
