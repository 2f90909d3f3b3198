#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times a GPT at two pipeline stages, here and under torch.distributed.pipelining, by turns; prints Markdown."""

import argparse
import sys
from statistics import mean, median

import output
from axes.axes_worker import SCHEDULES, contenders
from jobs import run_ranks, script
from memory import JobMemory
from settings import SIZES, WORLD

LEGEND = """\
Two ranks of one thread, a stage each; the same cut and the same weights, AdamW, fp32. Every turn steps each contender
once, every other turn in reverse order; a step begins at a barrier, has all micro-batches and an optimizer step, and
ends on the slower rank. "busy" is the same work of each rank's stage with nobody to wait for, both ranks at once.
Idle: the share of ranks' time in the median step that is not busy; it holds the bubble, messages, and what the stages'
work differs by. By formula, for equal stages, backwards of twice a forward's time and free messages. Losses of all
contenders are compared. Interleaved and zero_bubble beside ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble.
DeepSpeed's PipelineEngine, where it is installed, knows 1F1B alone.
"""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=("46m", "319m"), default="46m")
    parser.add_argument("--schedule", default="1f1b,gpipe", help="of " + ", ".join(SCHEDULES))
    parser.add_argument("--chunks", type=int, default=2, help="runs of blocks on each stage, of interleaved")
    parser.add_argument("--micro-batches", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=10, help="of each contender, timed")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each number of micro-batches")
    output.add_arguments(parser, "bench-axes")
    return parser.parse_args()


def slower(ranks, name):
    return [max(turn) for turn in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]


def idle_by_formula(schedule, count, chunks):
    work = {"interleaved": chunks * count, "zero_bubble": 3 * count}.get(schedule, count)
    return (WORLD - 1) / (work + WORLD - 1)


def differ(ranks, names):
    """The largest relative difference between contenders' losses of a step."""
    losses = [ranks[-1]["losses"][name] for name in names]
    return max((max(step) - min(step)) / max(step) for step in zip(*losses, strict=True))


def rows(count, outcome, options):
    if "ranks" not in outcome:
        return [[count, outcome.get("error", "?"), "", "", "", ""]]
    ranks, found, names = outcome["ranks"], [], contenders(options.schedule.split(","))
    busy = mean(median(rank["seconds"]["busy"]) for rank in ranks)
    for name in names:
        took = slower(ranks, name)
        idle = 100 * (1 - busy / median(took))
        cells = [f"{1e3 * min(took):.0f}", f"{1e3 * median(took):.0f}", f"{idle:.1f} %"]
        formula = idle_by_formula(name.split()[1], count, options.chunks)
        found.append([count, name, *cells, f"{100 * formula:.1f} %"])
    found.append([count, "busy", "", f"{1e3 * busy:.0f}", f"losses differ by {differ(ranks, names):.1e}", ""])
    return found


def main():
    options = parse_arguments()
    record, lines = output.new_record() | {"micro_batches": {}}, []
    for count in options.micro_batches:
        command = [
            *script("axes_worker"), "--model", options.model, "--micro-batches", str(count),
            *("--schedule", options.schedule, "--chunks", str(options.chunks)),
            *("--warmup", str(options.warmup), "--steps", str(options.steps)),
        ]  # fmt: skip
        outcome = record["micro_batches"][count] = run_ranks(command, WORLD, options.timeout, JobMemory())
        found = rows(count, outcome, options)
        lines += found
        print(*found, sep="\n", file=sys.stderr)
    title = f"Axes: {options.model} at {WORLD} stages, {SIZES[options.model].batch} sequences a micro-batch"
    header = ["micro-batches", "schedule", "best (ms)", "median (ms)", "idle", "by formula"]
    output.write(options, output.head(title, record, LEGEND) + output.table(header, lines), record)


if __name__ == "__main__":
    main()
