#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times two builds of Deeptide in turns, which tells a change from the machine's noise, and prints a Markdown table."""

import argparse
import itertools
import statistics
import sys
from pathlib import Path

import output
from jobs import run_job
from settings import SIZES


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="folder to import the older deeptide from")
    parser.add_argument("--deeptide", type=Path, default=output.ROOT / "build" / "python", help="that of the newer one")
    parser.add_argument("--model", choices=SIZES, default="46m")
    parser.add_argument("--precision", choices=("fp32", "bf16"), nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--stage", type=int, choices=range(4), nargs="+", default=[0, 3])
    parser.add_argument("--rounds", type=int, default=4, help="fresh jobs of each build")
    parser.add_argument("--steps", type=int, help="timed steps in a job; not given: as the model's size suggests")
    parser.add_argument("--warmup", type=int, help="untimed steps before them; likewise")
    parser.add_argument("--timeout", type=float, help="seconds for a job; not given: as steps and size suggest")
    options = parser.parse_args()
    size = SIZES[options.model]
    options.steps, options.warmup = options.steps or size.steps, options.warmup or size.warmup
    return options


def _job(options, folder, precision, stage):
    """(seconds of each step on its slowest rank, last loss of rank 0)."""
    of_build = argparse.Namespace(**{**vars(options), "deeptide": folder})
    outcome = run_job(f"deeptide-{stage}", precision, "its own", of_build)
    if "ranks" not in outcome:
        raise SystemExit(f"{folder}: {outcome}")
    steps = zip(*(rank["step_seconds"] for rank in outcome["ranks"]), strict=True)
    return [max(step) for step in steps], outcome["ranks"][0]["losses"][-1]


def _row(options, precision, stage):
    builds = [("old", options.old), ("new", options.deeptide)]
    seconds, losses = {"old": [], "new": []}, {}
    for number in range(options.rounds):
        for build, folder in builds if number % 2 == 0 else reversed(builds):
            steps, losses[build] = _job(options, folder, precision, stage)
            seconds[build] += steps
    figures = [
        1e3 * measure(seconds[build])
        for measure, build in itertools.product((min, statistics.median), ("old", "new"))
    ]  # fmt: skip
    ratios = [figures[1] / figures[0], figures[3] / figures[2]]
    same = "equal" if losses["old"] == losses["new"] else f"{losses['old']} and {losses['new']}"
    words = [options.model, precision, stage, *(f"{f:.1f}" for f in figures), *(f"{r:.3f}" for r in ratios), same]
    print("|", " | ".join(map(str, words)), "|", flush=True)


def main():
    options = parse_arguments()
    heads = "model, precision, stage, old best (ms), new best (ms), old median, new median, best, median, last losses"
    print("|", heads.replace(", ", " | "), "|")
    print("|", " | ".join(["---"] * 10), "|")
    for precision, stage in itertools.product(options.precision, options.stage):
        _row(options, precision, stage)


if __name__ == "__main__":
    sys.exit(main())
