#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times a Llama whose layers two ranks share, here, under torch's tensor.parallel and under AutoTP, by turns."""

import argparse
import sys
from statistics import median

import output
from axes.axes import differ, slower
from axes.shared_layers_worker import contenders
from jobs import run_ranks, script
from memory import JobMemory
from settings import WORLD

LEGEND = """\
Two ranks of one thread, which share the layers of Transformers' Llama, fp32, AdamW; a step is forward, backward and
the optimizer's. Every turn steps each contender once, every other turn in reverse order, from a barrier to the slower
rank's end. torch: parallelize_module with its tutorial's plan and loss_parallel. deepspeed: AutoTP, with the preset for
Llama. halves: a model of half the heads, features and words on each rank, and nobody to wait for: what it computes.
whole: the model on one rank, on both at once. Ratio: the median over turns of the step's time to deeptide's in it.
"""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=("46m", "319m"), default="46m")
    parser.add_argument("--batch", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8], help="samples")
    parser.add_argument("--overlap", action="store_true", help="tp_overlap_comm of DeepSpeed")
    parser.add_argument("--steps", type=int, default=10, help="of each contender, timed")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each batch")
    output.add_arguments(parser, "bench-tensor")
    return parser.parse_args()


def rows(batch, outcome):
    if "ranks" not in outcome:
        return [[batch, outcome.get("error", "?"), "", "", ""]]
    ranks, found = outcome["ranks"], []
    took = {name: slower(ranks, name) for name in contenders()}
    for name, seconds in took.items():
        ratio = median(one / here for one, here in zip(seconds, took["deeptide"], strict=True))
        found.append([batch, name, f"{1e3 * min(seconds):.0f}", f"{1e3 * median(seconds):.0f}", f"{ratio:.2f}"])
    alike = [name for name in took if name != "halves"]
    return [*found, [batch, f"losses differ by {differ(ranks, alike):.1e}", "", "", ""]]


def main():
    options = parse_arguments()
    record, lines = output.new_record() | {"batches": {}}, []
    for batch in options.batch:
        command = [
            *script("shared_layers_worker"), "--model", options.model, "--batch", str(batch),
            *("--warmup", str(options.warmup), "--steps", str(options.steps)),
            *(["--overlap"] if options.overlap else []),
        ]  # fmt: skip
        outcome = record["batches"][batch] = run_ranks(command, WORLD, options.timeout, JobMemory())
        found = rows(batch, outcome)
        lines += found
        print(*found, *outcome.get("logs", []), sep="\n", file=sys.stderr)
    title = f"Shared layers: a Llama of {options.model}'s shape on {WORLD} ranks"
    header = ["sequences", "contender", "best (ms)", "median (ms)", "ratio"]
    output.write(options, output.head(title, record, LEGEND) + output.table(header, lines), record)


if __name__ == "__main__":
    main()
