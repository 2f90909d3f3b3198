#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Does what the first ten minutes on a GPU are for, in one command: facts, build, kernels, smoke, speed, tests.

Needs a Python with torch, and for the build a compiler, CMake, Ninja and nvcc; no network. Each part is a process group
that ends by its own limit, writes its log into the output folder and gives one line; what fails stops nothing. Where
there is no GPU the parts that need one say so, and the others rehearse on the CPU.
"""

import argparse
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from plan import Command, Part, parts

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = 590.0


@dataclasses.dataclass
class Outcome:
    """A command's end. `code`: its exit status, None where it ran into its limit."""

    code: int | None
    seconds: float
    log: Path

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:160] if lines else "it printed nothing"


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it is the leader of a session of its own
    process.wait()


def run_together(commands: list[Command], limit_s: float, out: Path) -> list[Outcome]:
    """Runs all at once; those that take longer than `limit_s` are killed with what they have started."""
    begun = time.monotonic()
    running = []
    for command in commands:
        log = out / f"{command.name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command.words,
                env={**os.environ, **command.environment},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running.append((process, log))
    ended = []
    for process, log in running:
        try:
            code: int | None = process.wait(max(0.0, begun + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        _kill(process)  # what it left behind, too
        ended.append(Outcome(code, time.monotonic() - begun, log))
    return ended


def _word(code: int | None, limit_s: float) -> str:
    if code is None:
        return f"ran into its limit of {limit_s:.0f} s"
    return "ok" if code == 0 else f"failed ({code})"


def run_part(part: Part, limit_s: float, out: Path) -> str:
    """Runs a part and returns its line."""
    if part.skipped:
        return f"{part.name}: skipped, {part.skipped}"
    outcomes = run_together(part.commands, limit_s, out)
    if len(outcomes) == 1:
        only = outcomes[0]
        says = part.tell(out) if part.tell and only.code == 0 else only.last_words()
        return f"{part.name}: {_word(only.code, limit_s)}, {only.seconds:.0f} s: {says}"
    bad = [
        f"{command.name} {_word(outcome.code, limit_s)}: {outcome.last_words()}"
        for command, outcome in zip(part.commands, outcomes, strict=True)
        if outcome.code != 0
    ]
    seconds = max(outcome.seconds for outcome in outcomes)
    return f"{part.name}: {len(outcomes) - len(bad)} of {len(outcomes)} ok, {seconds:.0f} s" + "".join(
        f"\n  {line}" for line in bad
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-first-ten-minutes", help="the output folder")
    parser.add_argument("--build", type=Path, default=ROOT / "build-gpu", help="where to build, or what was built")
    parser.add_argument("--built", action="store_true", help="take what lies in --build as it is")
    parser.add_argument("--only", nargs="+", default=[], help="names of parts")
    parser.add_argument("--minutes", type=float, default=TOTAL_S / 60, help="for all parts together")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    end = begun + 60 * options.minutes
    lines = []
    for part in parts(ROOT, options.build.resolve(), out, options.built, options.jobs):
        if options.only and part.name not in options.only:
            continue
        left = end - time.monotonic()
        at = time.monotonic() - begun
        line = run_part(part, min(part.limit_s, left), out) if left > 1 else f"{part.name}: not run: no time is left"
        lines.append(f"{int(at) // 60}:{int(at) % 60:02d} {line}")
        print(lines[-1], flush=True)
        (out / "lines.txt").write_text("\n".join(lines) + "\n")
    print(f"\n{out}:", *lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
