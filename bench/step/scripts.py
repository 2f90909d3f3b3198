#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times a script of Transformers' Trainer under DDP, FSDP2, DeepSpeed and here, and our own loop; prints Markdown."""

import argparse
import sys
from pathlib import Path
from statistics import median

import output
from jobs import SET_UP_SECONDS, run_watched, script
from report import final_loss, round_seconds
from settings import WORLD
from step.script_worker import WAYS

SLOWEST_STEP = 15  # seconds
LEGEND = """\
A Llama of 46 M parameters from its configuration, 2 ranks of one thread, 2 rows of 128 tokens each, AdamW, clipping 1.
All but the loops are one script of Trainer; the loops are the same model, data and `ds_config` without it. A round's
step is the median over its steps of the slower rank's time, from a barrier to the return; shown are the best and the
median round, and the medians of the ratios within a round: to our loop at the same stage, and to DeepSpeed's stage 3.
Job peak: what both ranks took together in the timed steps, shared pages counted once."""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, help="fresh jobs of each")
    parser.add_argument("--steps", type=int, default=8, help="timed steps in a job")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps before them")
    parser.add_argument("--deeptide", type=Path, default=output.ROOT / "build" / "python", help="folder to import from")
    output.add_arguments(parser, "bench-scripts")
    return parser.parse_args()


def run(way, options):
    command = [
        *script("script_worker"), "--way", way, "--precision", options.precision, "--warmup", str(options.warmup),
        "--steps", str(options.steps),
    ]  # fmt: skip
    timeout = SET_UP_SECONDS + (options.warmup + options.steps) * SLOWEST_STEP
    return run_watched(command, WORLD, timeout, deeptide_path=options.deeptide)


def why_not(outcome):
    return outcome.get("error") or outcome["skipped"]


def run_rounds(options):
    """Yields a job at a time, every other round backwards, so that drift does not favour anyone."""
    for number in range(1, options.rounds + 1):
        for way in options.only if number % 2 else reversed(options.only):
            outcome = run(way, options)
            said = f"{round_seconds(outcome):.3f} s" if "ranks" in outcome else why_not(outcome)
            print(f"round {number}, {way}: {said}", file=sys.stderr, flush=True)
            yield {"round": number, "way": way} | outcome


def rows_of(options, jobs):
    of = {way: {job["round"]: job for job in jobs if job["way"] == way} for way in options.only}
    seconds = {
        way: {number: round_seconds(job) for number, job in rounds.items() if "ranks" in job}
        for way, rounds in of.items()
    }

    def ratio(way, other):
        theirs = seconds.get(other, {})
        ratios = [own / theirs[number] for number, own in seconds[way].items() if number in theirs]
        return f"{median(ratios):.2f}" if ratios and way != other else ""

    for way in options.only:
        done = [job for job in of[way].values() if "ranks" in job]
        if not done:
            first = next(iter(of[way].values()))
            yield [way, why_not(first), "", "", "", "", ""]
            continue
        own = seconds[way].values()
        yield [
            way, f"{min(own) * 1e3:.0f}", f"{median(own) * 1e3:.0f}", ratio(way, f"loop-{way[-1]}"),
            ratio(way, "deepspeed-3"), f"{max(job['job_peak'] for job in done) / 2**20:.0f}",
            f"{final_loss(done[-1]):.4f}",
        ]  # fmt: skip


def main():
    options = parse_arguments()
    record = output.new_record()
    record["jobs"] = list(run_rounds(options))
    header = ["way", "best (ms)", "median (ms)", "x loop", "x deepspeed-3", "job peak (MiB)", "last loss"]
    text = output.head(f"A Trainer script, {options.precision}", record, LEGEND)
    output.write(options, text + "\n" + output.table(header, rows_of(options, record["jobs"])), record)
    sys.exit(int(any("error" in job for job in record["jobs"])))


if __name__ == "__main__":
    main()
