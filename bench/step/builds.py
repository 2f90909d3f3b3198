#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times two builds of Deeptide, whose jobs live at the same time and step by turns; prints a Markdown table.

Difference: the median of each turn's, with its 95 % interval; of a step's time on the slower rank, and of the time of
processors that both ranks' threads took, which does not count what else the machine does.
"""

import argparse
import itertools
import statistics
import sys
from pathlib import Path

import output
from jobs import run_job
from settings import SIZES
from step.pairs import difference
from turns import run_by_turns

NAMES = ("old", "new")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="folder to import the older deeptide from")
    parser.add_argument("--deeptide", type=Path, default=output.ROOT / "build" / "python", help="that of the newer one")
    parser.add_argument("--model", choices=SIZES, default="46m")
    parser.add_argument("--precision", choices=("fp32", "bf16"), nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--stage", type=int, choices=range(4), nargs="+", default=[0, 3])
    parser.add_argument("--rounds", type=int, default=3, help="fresh pairs of jobs")
    parser.add_argument("--steps", type=int, help="timed steps in a job; not given: as the model's size suggests")
    parser.add_argument("--warmup", type=int, help="untimed steps before them; likewise")
    parser.add_argument("--timeout", type=float, help="seconds for a job; not given: as steps and size suggest")
    options = parser.parse_args()
    size = SIZES[options.model]
    options.steps, options.warmup = options.steps or size.steps, options.warmup or size.warmup
    return options


def _pair(options, precision, stage):
    """By build: what its job's ranks measured. Both jobs live at the same time, and step by turns."""
    packages = dict(zip(NAMES, (options.old, options.deeptide), strict=True))

    def run(name, words, settings):
        of_build = argparse.Namespace(**{**vars(options), "deeptide": packages[name]})
        return run_job(f"deeptide-{stage}", precision, "its own", of_build, more=words, **settings)

    found = run_by_turns(NAMES, run)
    for name in NAMES:
        if "ranks" not in found[name]:
            raise SystemExit(f"the {name} build: {found[name]}")
    return {name: found[name]["ranks"] for name in NAMES}


def _of_steps(ranks, kind, over):
    return [over(step) for step in zip(*(rank[kind] for rank in ranks), strict=True)]


def _row(options, precision, stage):
    seconds, busy = ({name: [] for name in NAMES} for _ in range(2))
    losses = {}
    for _ in range(options.rounds):
        for name, ranks in _pair(options, precision, stage).items():
            seconds[name] += _of_steps(ranks, "step_seconds", max)
            busy[name] += _of_steps(ranks, "step_processor_seconds", sum)
            losses[name] = ranks[0]["losses"][-1]
    old, new = (seconds[name] for name in NAMES)
    figures = [f"{1e3 * measure(each):.0f}" for measure in (min, statistics.median) for each in (old, new)]
    same = "equal" if len(set(losses.values())) == 1 else f"{losses['old']} and {losses['new']}"
    words = [options.model, precision, stage, len(old), *figures, difference(old, new)]
    words += [difference(*(busy[name] for name in NAMES)), same]
    print("|", " | ".join(map(str, words)), "|", flush=True)


def main():
    options = parse_arguments()
    heads = "model, precision, stage, steps, old best (ms), new best (ms), old median, new median"
    heads += ", difference, of processors' time, last losses"
    print("|", heads.replace(", ", " | "), "|")
    print("|", " | ".join(["---"] * 11), "|")
    for precision, stage in itertools.product(options.precision, options.stage):
        _row(options, precision, stage)


if __name__ == "__main__":
    sys.exit(main())
