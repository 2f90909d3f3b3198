#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Holds the bubble of stages that sleep against the formula's, for each schedule; prints Markdown."""

import argparse
import sys
from statistics import median

import output
from jobs import run_ranks, script
from memory import JobMemory

LEGEND = """\
Stages of equal length: each sleeps the same time for a micro-batch's forward, for the gradient of its input and for
those of its weights, so ranks do not compete for a machine's cores, memory and clock. Bubble: the share of the stages'
time in which they waited for letters, as engine.bubble() has it, the median step. By formula: the schedule's own, of
equal stages and free letters. Longer: the median step over the time that sleep and the formula's bubble make.
"""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--schedule", default=",".join(SCHEDULES))
    parser.add_argument("--stages", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4])
    parser.add_argument("--micro-batches", type=lambda text: [int(n) for n in text.split(",")], default=[4, 8, 16])
    parser.add_argument("--chunks", type=int, default=2, help="of each stage, of interleaved")
    parser.add_argument("--seconds", type=float, default=0.05, help="of a stage's forward")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each job")
    output.add_arguments(parser, "bench-bubble")
    return parser.parse_args()


def row(stages, schedule, count, outcome, seconds):
    if "ranks" not in outcome:
        print(*outcome.get("logs", []), sep="\n", file=sys.stderr)
        return [stages, schedule, count, outcome["error"], "", "", ""]
    ranks = outcome["ranks"]
    took = median(max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True))
    bubble, formula = median(ranks[0]["bubbles"]), ranks[0]["formula"]
    expected = 3 * seconds * count / (1 - formula)
    figures = [
        f"{1e3 * took:.0f}",
        f"{100 * bubble:.1f} %",
        f"{100 * formula:.1f} %",
        f"{100 * (took / expected - 1):+.1f} %",
    ]
    return [stages, schedule, count, *figures]


def main():
    options = parse_arguments()
    record, lines = output.new_record() | {"jobs": []}, []
    for stages in options.stages:
        for schedule in options.schedule.split(","):
            for count in options.micro_batches:
                command = [
                    *script("bubble_worker"), "--schedule", schedule, "--micro-batches", str(count),
                    *("--chunks", str(options.chunks), "--seconds", str(options.seconds)),
                    *("--warmup", str(options.warmup), "--steps", str(options.steps)),
                ]  # fmt: skip
                outcome = run_ranks(command, stages, options.timeout, JobMemory())
                record["jobs"].append({"stages": stages, "schedule": schedule, "micro_batches": count} | outcome)
                lines.append(row(stages, schedule, count, outcome, options.seconds))
                print(lines[-1], file=sys.stderr)
    header = ["stages", "schedule", "micro-batches", "step (ms)", "bubble", "by formula", "longer"]
    output.write(
        options, output.head("Bubbles of stages that sleep", record, LEGEND) + output.table(header, lines), record
    )


if __name__ == "__main__":
    main()
