# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Runs clang-tidy over sources as the build compiles them: tools/tidy.py BUILD [FILE…] [--changed] [--seconds N].

A unity build parses torch's headers once for several sources, so clang-tidy runs on the same translation units: all of
src takes minutes instead of an hour. A header is checked in a unit that includes it.

--changed takes the files that differ from the main branch; on the main branch itself, those of the last commits, newest
first. --seconds bounds the time. What was not reached is named, and is not a failure. Exits with 1 if a check fails in
one of the files; findings in other files of their units are only shown.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("include/", "src/")
LAST_COMMITS = 10
# A unit's main file is generated; nothing else includes a .cc.
CHECKS = "-bugprone-suspicious-include"
FLAGS = ("-Wno-unknown-warning-option", "-Wno-error")  # those of gcc; and what the build treats as errors


def main() -> int:
    """Runs the checks and reports; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    os.chdir(ROOT)
    units = units_of(args.build)
    files, origin = (changed_files(), "changed") if args.changed else (args.files or all_sources(), "given")
    wanted = units_for(files, units)
    print(f"tidy: {len(files)} files {origin}, in {len(wanted)} of {len(units)} translation units", flush=True)
    return run(args, {unit: units[unit] for unit in wanted}, set(files))


def units_of(build: Path) -> dict[Path, list[str]]:
    """Returns each translation unit of the product and its sources, relative to the root."""
    units = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = Path(entry["file"])
        sources = [path]
        if path.suffix == ".cxx":
            sources = [ROOT / name for name in re.findall(r'#include "(.*)"', path.read_text())]
        names = [str(source.relative_to(ROOT)) for source in sources if source.is_relative_to(ROOT)]
        if names and all(name.startswith(FOLDERS) for name in names):
            units[path] = names
    return units


def units_for(files: list[str], units: dict[Path, list[str]]) -> list[Path]:
    """Returns the units in which the files are checked, in the order of the files."""
    unit_of = {source: unit for unit, sources in units.items() for source in sources}
    wanted = {}
    for file in files:
        source = file if file in unit_of else includer_of(file, unit_of)
        if source in unit_of:
            wanted[unit_of[source]] = True
    return list(wanted)


def includer_of(header: str, unit_of: dict[str, Path]) -> str | None:
    """Returns the source of a header, or else the first source that includes it."""
    own = str(Path(header).with_suffix(".cc"))
    if own in unit_of:
        return own
    line = f'#include "{header.removeprefix("include/").removeprefix("src/")}"'
    return next((source for source in sorted(unit_of) if line in (ROOT / source).read_text()), None)


def all_sources() -> list[str]:
    """Returns every source of the product."""
    return git("ls-files", "src/*.cc").split()


def changed_files(folders: tuple[str, ...] = FOLDERS) -> list[str]:
    """Returns the files below folders that changed since the main branch or, on it, in the last commits."""
    base = main_branch_base()
    if base:
        names = git("diff", "--name-only", "--diff-filter=d", base).split()
    else:
        names = []
        for commit in git("rev-list", "--first-parent", f"--max-count={LAST_COMMITS}", "HEAD").split():
            names += by_turns(files_of(commit))
    names += git("ls-files", "--others", "--exclude-standard").split()
    return [name for name in dict.fromkeys(names) if name.startswith(folders) and (ROOT / name).exists()]


def files_of(commit: str) -> list[str]:
    """Returns the files that a commit changed; of a shallow clone's last known commit, all files."""
    return git("diff-tree", "--root", "-m", "--first-parent", "-r", "--name-only", "--no-commit-id", commit).split()


def main_branch_base() -> str | None:
    """Returns where this branch left the main one, or None on it, or where the clone does not know."""
    head = git("rev-parse", "HEAD").strip()
    for branch in (os.environ.get("TIDY_BASE"), "origin/HEAD", "origin/main", "main"):
        if branch and (base := git("merge-base", "HEAD", branch, check=False).strip()) and base != head:
            return base
    return None


def by_turns(names: list[str]) -> list[str]:
    """Orders files differently for every commit: runs that reach only some of many files reach others each time."""
    turn = git("rev-parse", "HEAD").strip()
    return sorted(names, key=lambda name: hashlib.sha256(f"{turn} {name}".encode()).digest())


def run(args: argparse.Namespace, units: dict[Path, list[str]], files: set[str]) -> int:
    """Checks the units until the time is over and prints what failed and what was not reached."""
    deadline = time.monotonic() + args.seconds
    failed, late, reached = [], [], 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = {pool.submit(check, args.build, unit, deadline): unit for unit in units}
        for done in concurrent.futures.as_completed(runs):
            unit, (code, output, seconds) = runs[done], done.result()
            if code is None:
                late += units[unit]
                continue
            reached += 1
            print(f"tidy: {seconds:.0f} s: {' '.join(units[unit])}\n{output}", end="", flush=True)
            if code and not all(is_of_others(line, files) for line in errors_in(output)):
                failed.append(unit)
    if late:
        print(f"tidy: not reached within {args.seconds:.0f} s: {' '.join(late)}")
    print(f"tidy: {reached} of {len(units)} units checked, {len(failed)} with errors")
    return 1 if failed else 0


def errors_in(output: str) -> list[str]:
    """Returns the lines that report errors; where a program failed without any, an empty one."""
    return re.findall(r"^.*?: (?:fatal )?error: .*", output, re.MULTILINE) or [""]


def is_of_others(error: str, files: set[str]) -> bool:
    """Says whether an error lies in a source of the product that is not among the files."""
    path = Path(error.partition(":")[0])
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
    return name.startswith(FOLDERS) and name not in files


def check(build: Path, unit: Path, deadline: float) -> tuple[int | None, str, float]:
    """Runs clang-tidy on one unit: its exit code (None if there was no time), findings and seconds."""
    started = time.monotonic()
    if started >= deadline:
        return None, "", 0.0
    flags = [f"--extra-arg={flag}" for flag in FLAGS]
    command = [clang_tidy(), "--quiet", f"--checks={CHECKS}", *flags, "-p", str(build), str(unit)]
    limit = None if deadline == float("inf") else deadline - started
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return None, "", 0.0
    errors = [line for line in result.stderr.splitlines(True) if not re.match(r"\d+ warnings? ", line)]
    return result.returncode, result.stdout + "".join(errors), time.monotonic() - started


def clang_tidy() -> str:
    """Returns the newest clang-tidy of this machine."""
    found = subprocess.run([str(ROOT / "tools/clang.sh"), "clang-tidy"], capture_output=True, text=True)
    if found.returncode:
        sys.exit(found.stderr)
    return found.stdout.strip()


def git(*args: str, check: bool = True) -> str:
    """Returns the output of a git command."""
    return subprocess.run(["git", *args], capture_output=True, text=True, check=check, cwd=ROOT).stdout


if __name__ == "__main__":
    sys.exit(main())
