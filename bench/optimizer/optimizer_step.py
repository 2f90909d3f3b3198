#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times an optimizer step over one flat shard: Deeptide's kernels, DeepSpeedCPUAdam and torch; prints Markdown."""

import argparse
import sys
from pathlib import Path
from statistics import median

import output
from jobs import run_ranks, script
from memory import JobMemory

# Bytes that a way's passes read and write for an element, without the lines that a processor reads before it writes.
BYTES = {
    "bf16": {
        "Deeptide": 2 + 28,  # norm; update with sum, clip and cast
        "Deeptide, packed": 2 + 26,  # the master's lower half, and the parameter that is its upper one
        "Deeptide, packed, bf16 moments": 2 + 18,
        "DeepSpeedCPUAdam, staged": 6 + 4 + 8 + 28 + 6,  # widen; norm; clip; update; cast
        "torch fused AdamW, staged": 6 + 4 + 8 + 28 + 6,
    },
    "fp32": {"triad": 28, "Deeptide": 28, "DeepSpeedCPUAdam": 28, "torch fused AdamW": 28},
}
# The rules in fp32, and the triad over as many streams: 4 bytes read, and 8 for the parameter and for each state. LAMB
# passes twice: 24 bytes, then 16.
RULE_BYTES = {
    "SGD": (12, "triad, 0 states"),
    "SGD, momentum": (20, "triad, 1 states"),
    "Lion": (20, "triad, 1 states"),
    "Adagrad": (20, "triad, 1 states"),
    "RMSprop": (20, "triad, 1 states"),
    "RMSprop, momentum": (28, "triad, 2 states"),
    "AdamW": (28, "triad, 2 states"),
    "LAMB": (40, "triad, 2 states"),
}
# Passes of signs: a bit and an fp32 number of each element, read or written; the norm before them reads only.
SIGN_BYTES = {
    "norm": (4, "triad, 0 states"),
    "split": (8.125, "triad, 0 states"),
    "add": (8.125, "triad, 0 states"),
    "set": (4.125, "triad, 0 states"),
}
PEERS = ("torch fused", "DeepSpeed")  # of these rules, where they have a kernel
TRIAD_BYTES = {"triad, 0 states": 12, "triad, 1 states": 20, "triad, 2 states": 28}
LEGEND = """\
bf16: gradient and parameter in bf16, fp32 master and moments; norm, finite check, clipping, update and cast to bf16.
Packed: "packed_states" and, with bf16 moments, "moment_dtype": "bf16", rounded stochastically; a peer's time divided by
theirs is the ratio of the two "x Deeptide".
fp32: the update alone, beside a triad of the same seven streams (four read, three written). All ways work on the same
memory, in large pages. Best and median over the repetitions; bytes: what the way's passes read and write for an
element; x and %: each repetition's ratio to Deeptide's time (above 1: Deeptide is faster) and its share of the triad's
speed, then the median. Every optimizer: the update alone in fp32, and its bytes per second as a share of those of a
triad over as many streams; x of a peer: its time divided by Deeptide's."""


def parse_arguments():
    built = output.ROOT / "build" / "bench" / "libdeeptide_optimizer_ops.so"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--numel", type=int, default=128 << 20, help="elements; 26 bytes of memory each")
    parser.add_argument("--threads", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each number of threads")
    parser.add_argument("--library", type=Path, default=built, help="optimizer_ops.cc, built")
    output.add_arguments(parser, "bench-optimizer")
    options = parser.parse_args()
    if not options.library.is_file():
        parser.error(f"no {options.library}: build it with `make bench-optimizer`")
    return options


def _ratio(mine, theirs):
    return median(a / b for a, b in zip(mine, theirs, strict=True))


def _table(precision, seconds, numel):
    header = ["way", "best (ms)", "median (ms)", "bytes", "GB/s, best", "x Deeptide"]
    if "triad" in seconds:
        header.append("% of triad")
    rows = []
    for name, size in BYTES[precision].items():
        if name not in seconds:
            continue
        own = seconds[name]
        rows.append([
            name, f"{min(own) * 1e3:.1f}", f"{median(own) * 1e3:.1f}", size, f"{size * numel / min(own) / 1e9:.1f}",
            f"{_ratio(own, seconds['Deeptide']):.2f}",
        ])  # fmt: skip
        if "triad" in seconds:
            rows[-1].append(f"{100 * _ratio(seconds['triad'], own):.0f}")
    return output.table(header, rows)


def _streams_table(what, sizes, seconds, numel, peers=()):
    rows = []
    for name, (size, triad) in sizes.items():
        own, speed = seconds[name], lambda way, bytes: bytes * numel / min(seconds[way]) / 1e9
        share = _ratio(seconds[triad], own) * size / TRIAD_BYTES[triad]
        rows.append([
            name, f"{min(own) * 1e3:.1f}", f"{median(own) * 1e3:.1f}", size, f"{speed(name, size):.1f}",
            f"{speed(triad, TRIAD_BYTES[triad]):.1f}", f"{100 * share:.0f}",
        ])  # fmt: skip
        for peer in peers:
            theirs = seconds.get(f"{name}, {peer}")
            rows[-1].append(f"{_ratio(theirs, own):.2f}" if theirs else "")
    header = [what, "best (ms)", "median (ms)", "bytes", "GB/s, best", "triad's GB/s, best", "% of triad"]
    header += [f"x {peer}" for peer in peers]
    return output.table(header, rows)


def markdown(record):
    parts = [output.head("Optimizer step", record, f"{LEGEND}\n\n{record['numel']} elements.")]
    for run in record["runs"]:
        threads = f"{run['threads']} thread{'s' * (run['threads'] > 1)}"
        if "ranks" not in run:
            parts.append(f"## {threads}: failed\n\n{run['error']}\n")
            continue
        for precision, seconds in run["ranks"][0].items():
            if precision == "rules":
                table = _streams_table("optimizer", RULE_BYTES, seconds, record["numel"], PEERS)
                parts.append(f"## Every optimizer, {threads}\n\n{table}")
                continue
            if precision == "signs":
                table = _streams_table("pass", SIGN_BYTES, seconds, record["numel"])
                parts.append(f"## Signs of 1-bit optimizers, {threads}\n\n{table}")
                continue
            parts.append(f"## {precision}, {threads}\n\n{_table(precision, seconds, record['numel'])}")
    return "\n".join(parts)


def main():
    options = parse_arguments()
    record = output.new_record() | {"numel": options.numel, "runs": []}
    for threads in options.threads:
        command = [
            *script("optimizer_worker"), "--library", options.library, "--numel", str(options.numel),
            "--repetitions", str(options.repetitions), "--threads", str(threads),
        ]  # fmt: skip
        outcome = run_ranks(command, 1, options.timeout, JobMemory(), threads=threads)
        record["runs"].append({"threads": threads, **outcome})
    output.write(options, markdown(record), record)
    sys.exit(int(any("error" in run for run in record["runs"])))


if __name__ == "__main__":
    main()
