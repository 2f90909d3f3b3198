#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times a GPT at two pipeline stages, here and under torch.distributed.pipelining, by turns; prints Markdown."""

import argparse
import sys
from statistics import mean, median

import output
from axes.axes_worker import BUSY, SCHEDULES, contenders
from axes.by_turns import TUNED, differ, run_contenders, slower
from jobs import script
from settings import SIZES, WORLD

LEGEND = """\
Two ranks of one thread, a stage each; the same cut and the same weights, AdamW, fp32. Each contender is a job of its
own; all live at the same time. Every turn steps each once, every other turn in reverse order; a step begins at a
barrier, has all micro-batches and an optimizer step, and ends on the slower rank. tuned: with a glibc that keeps its
memory; Deeptide brings an allocator. "busy" is the same work of each rank's stage with nobody to wait for, both ranks
at once. Ratio: Deeptide's step to the contender's in the same turn, the median. Idle: the share of ranks' time in the
median step that is not busy; it holds the bubble, messages, and what the stages' work differs by. By formula, for equal
stages, backwards of twice a forward's time and free messages. Losses of all contenders are compared. Interleaved and
zero_bubble beside ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble. DeepSpeed's PipelineEngine, where it is
installed, knows 1F1B alone.
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


def idle_by_formula(schedule, count, chunks):
    work = {"interleaved": chunks * count, "zero_bubble": 3 * count}.get(schedule, count)
    return (WORLD - 1) / (work + WORLD - 1)


def rows(count, outcome, options):
    if "ranks" not in outcome:
        return [[count, outcome["error"], "", "", "", "", ""]]
    ranks, found, names = outcome["ranks"], [], contenders(options.schedule.split(","))
    busy = mean(median(rank["seconds"]) for rank in ranks[BUSY])
    for name in names:
        schedule = name.removesuffix(TUNED).split()[1]
        took, here = slower(ranks[name]), slower(ranks[f"deeptide {schedule}"])
        ratio = median(one / other for one, other in zip(here, took, strict=True))
        idle, formula = 1 - busy / median(took), idle_by_formula(schedule, count, options.chunks)
        cells = [f"{1e3 * min(took):.0f}", f"{1e3 * median(took):.0f}", f"{ratio:.3f}"]
        found.append([count, name, *cells, f"{100 * idle:.1f} %", f"{100 * formula:.1f} %"])
    alike = differ([ranks[name] for name in names])
    found.append([count, "busy", "", f"{1e3 * busy:.0f}", "", f"losses differ by {alike:.1e}", ""])
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
        names = [*contenders(options.schedule.split(",")), BUSY]
        outcome = record["micro_batches"][count] = run_contenders(names, command, options.timeout)
        found = rows(count, outcome, options)
        lines += found
        print(*found, sep="\n", file=sys.stderr)
    title = f"Axes: {options.model} at {WORLD} stages, {SIZES[options.model].batch} sequences a micro-batch"
    header = ["micro-batches", "contender", "best (ms)", "median (ms)", "ratio", "idle", "by formula"]
    output.write(options, output.head(title, record, LEGEND) + output.table(header, lines), record)


if __name__ == "__main__":
    main()
