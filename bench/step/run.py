#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times Deeptide beside its peers on one CPU machine: one job at a time, in rounds, and prints a Markdown table."""

import argparse
import itertools
import signal
import sys
from pathlib import Path

import output
import report
from contenders import CONTENDERS
from jobs import run_job
from settings import SIZES

PRECISIONS = ("fp32", "bf16")


def _names(known):
    def parse(text):
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}, expected some of {', '.join(known)}")
        return names

    return parse


def parse_arguments():
    built = output.ROOT / "build" / "python"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="46m", help="small: 400 layers of 64 x 64")
    usual = [name for name in CONTENDERS if not name.endswith(("-waiting", "-nvme"))]
    parser.add_argument("--only", type=_names(CONTENDERS), default=usual, metavar="NAME,...")
    parser.add_argument("--precision", type=_names(PRECISIONS), default=list(PRECISIONS), metavar="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=3, help="fresh jobs of each contender")
    parser.add_argument("--steps", type=int, help="timed steps in a job; not given: as the model's size suggests")
    parser.add_argument("--warmup", type=int, help="untimed steps before them; likewise")
    parser.add_argument("--quick", action="store_true", help="1 round of 3 steps after 2: a trial, not a measurement")
    parser.add_argument("--timeout", type=float, help="seconds for a job; not given: as steps and size suggest")
    output.add_arguments(parser, "bench")
    parser.add_argument(
        "--deeptide",
        type=Path,
        default=built if built.is_dir() else None,
        help="folder to import deeptide from; none: the one installed",
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.warmup = 1, 3, 2
    size = SIZES[options.model]
    options.steps, options.warmup = options.steps or size.steps, options.warmup or size.warmup
    return options


def _schedule(options):
    """Each round runs every job once, every other round backwards, so that drift does not favour anyone."""
    jobs = [
        (precision, name, allocator)
        for name, precision in itertools.product(options.only, options.precision)
        for allocator in (("its own",) if name.startswith("deeptide") else ("default", "tuned"))
    ]
    for number in range(1, options.rounds + 1):
        for job in jobs if number % 2 else reversed(jobs):
            yield number, *job


def _place_in_report(job):
    name = job["contender"]
    return PRECISIONS.index(job["precision"]), list(CONTENDERS).index(name), job["allocator"], job["round"]


def _run(options, jobs):
    schedule = list(_schedule(options))
    for index, (number, precision, name, allocator) in enumerate(schedule, 1):
        outcome = run_job(name, precision, allocator, options)
        jobs.append(dict(contender=name, allocator=allocator, precision=precision, round=number, **outcome))
        if "ranks" in outcome:
            words = f"{report.round_seconds(outcome):.3f} s"
        else:
            words = " ".join(f"{key}: {outcome[key]}" for key in ("skipped", "error") if key in outcome)
        print(f"[{index}/{len(schedule)}] {precision} {name} ({allocator}): {words}", file=sys.stderr, flush=True)


def _stop(signal_number, frame):
    raise KeyboardInterrupt  # so that the jobs' clean-up runs for SIGTERM as for ^C


def main():
    options = parse_arguments()
    signal.signal(signal.SIGTERM, _stop)
    jobs = []
    record = output.new_record() | {"jobs": jobs}
    try:
        _run(options, jobs)
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    jobs.sort(key=_place_in_report)
    output.write(options, report.markdown(record), record)
    sys.exit(130 if interrupted else int(any("error" in job for job in jobs)))


if __name__ == "__main__":
    main()
