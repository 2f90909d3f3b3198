#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times a Llama whose layers two ranks share, here, under torch's tensor.parallel and under AutoTP, by turns."""

import argparse
import sys
from statistics import median

import output
from axes.by_turns import TUNED, differ, run_contenders, slower
from axes.shared_layers_worker import contenders
from jobs import script
from settings import WORLD

LEGEND = """\
Two ranks of one thread, which share the layers of Transformers' Llama, fp32, AdamW; a step is forward, backward and
the optimizer's. Each contender is a job of its own; all live at the same time. Every turn steps each once, every other
turn in reverse order, from a barrier to the slower rank's end. tuned: with a glibc that keeps its memory; Deeptide
brings an allocator. torch: parallelize_module with its tutorial's plan and loss_parallel. deepspeed: AutoTP, with the
preset for Llama. halves: a model of half the heads, features and words on each rank, and nobody to wait for: what it
computes. whole: the model on one rank, on both at once. Ratio: the median over turns of the step's time to deeptide's.
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
        return [[batch, outcome["error"], "", "", ""]]
    ranks, found = outcome["ranks"], []
    here = slower(ranks["deeptide"])
    for name in contenders():
        seconds = slower(ranks[name])
        ratio = median(one / ours for one, ours in zip(seconds, here, strict=True))
        found.append([batch, name, f"{1e3 * min(seconds):.0f}", f"{1e3 * median(seconds):.0f}", f"{ratio:.2f}"])
    alike = differ([ranks[name] for name in contenders() if name != f"halves{TUNED}"])
    return [*found, [batch, f"losses differ by {alike:.1e}", "", "", ""]]


def main():
    options = parse_arguments()
    record, lines = output.new_record() | {"batches": {}}, []
    for batch in options.batch:
        command = [
            *script("shared_layers_worker"), "--model", options.model, "--batch", str(batch),
            *("--warmup", str(options.warmup), "--steps", str(options.steps)),
            *(["--overlap"] if options.overlap else []),
        ]  # fmt: skip
        outcome = record["batches"][batch] = run_contenders(contenders(), command, options.timeout)
        found = rows(batch, outcome)
        lines += found
        print(*found, sep="\n", file=sys.stderr)
    title = f"Shared layers: a Llama of {options.model}'s shape on {WORLD} ranks"
    header = ["sequences", "contender", "best (ms)", "median (ms)", "ratio"]
    output.write(options, output.head(title, record, LEGEND) + output.table(header, lines), record)


if __name__ == "__main__":
    main()
