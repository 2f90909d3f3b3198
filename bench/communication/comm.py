#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times collectives between ranks of one host: Gloo, DeepSpeed's shared memory and Deeptide's; prints Markdown."""

import argparse
import sys
from pathlib import Path
from statistics import median

import output
from jobs import run_ranks, script
from memory import JobMemory

SIZES = tuple(4 << shift for shift in (10, 12, 14, 16, 18, 20, 22, 24, 27))  # 4 KiB to 64 MiB by fours, 512 MiB
# Bus bandwidth as nccl-tests and DeepSpeed's ds_bench define it: what a link must carry, whatever the number of ranks.
BUS_FACTOR = {
    "all-gather": lambda world: (world - 1) / world,
    "reduce-scatter": lambda world: (world - 1) / world,
    "all-reduce": lambda world: 2 * (world - 1) / world,
}
LEGEND = """\
fp32, one thread per rank. Time of a call, of calls one after the other, on the slowest rank: best / median of all
repetitions. GB/s, from the median, as nccl-tests: algorithm bandwidth (size / time) / bus bandwidth (that times
(n - 1) / n, for all-reduce 2 (n - 1) / n). Size: what a rank receives (all-gather) or contributes (the others). Gloo:
c10d's own over loopback; ordered: its all-to-all and our sum in rank order. Shared: comm::Group on any tensors, through
slots in shared memory. In place: on buffers of the shared arena, as training does it, results in shared memory.
DeepSpeed: its inference_all_reduce. x: Gloo's (DeepSpeed's) median time over ours."""


def _number(text):
    """Reads 4096, 4KiB, 1MiB and the like."""
    for unit, factor in (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)):
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)


def _list_of(parse):
    return lambda text: [parse(word) for word in text.split(",")]


def parse_arguments():
    built = output.ROOT / "build" / "bench" / "deeptide_comm_bench"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=_list_of(int), default=[2, 4], metavar="N,...")
    parser.add_argument("--sizes", type=_list_of(_number), default=list(SIZES), metavar="4KiB,...")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes of each")
    parser.add_argument("--repetitions", type=int, default=5, help="in each of them")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the processes of a round")
    parser.add_argument("--program", type=Path, default=built, help="comm_bench.cc, built")
    output.add_arguments(parser, "bench-comm")
    options = parser.parse_args()
    if not options.program.is_file():
        parser.error(f"no {options.program}: build it with `make bench-comm`")
    return options


def _collect(world, outcome, seconds):
    """seconds[world, collective, path, bytes]: of each repetition the slowest rank's."""
    for rows in zip(*outcome["ranks"], strict=True):
        key = (world, rows[0]["collective"], rows[0]["path"], rows[0]["bytes"])
        seconds.setdefault(key, []).extend(map(max, zip(*(row["seconds"] for row in rows), strict=True)))


def _run(options, seconds, failures):
    arguments = ["--sizes", ",".join(map(str, options.sizes)), "--repetitions", str(options.repetitions)]
    programs = {
        "deeptide_comm_bench": [options.program, *arguments],
        "DeepSpeed": [*script("comm_deepspeed"), *arguments],
    }
    for number in range(1, options.rounds + 1):
        for world in options.ranks:
            for name, command in programs.items():
                outcome = run_ranks(command, world, options.timeout, JobMemory())
                if "ranks" in outcome:
                    _collect(world, outcome, seconds)
                    words = "done"
                else:
                    words = outcome.get("skipped") or outcome["error"]
                    failures.append({"round": number, "ranks": world, "program": name, **outcome})
                print(f"round {number}, {world} ranks, {name}: {words}", file=sys.stderr, flush=True)


def _size_words(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _time_words(seconds):
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"


def _table(world, collective, seconds):
    by_size = {}
    for (w, c, path, size), values in seconds.items():
        if (w, c) == (world, collective):
            by_size.setdefault(size, {})[path] = values
    paths = list(dict.fromkeys(path for of in by_size.values() for path in of))
    peers = [peer for peer in ("Gloo", "DeepSpeed") if peer in paths]
    ratios = [(ours, peer) for ours in ("shared", "in place") if ours in paths for peer in peers]
    header = ["size"]
    for path in paths:
        header += [path, "GB/s"]
    header += [f"{ours} x {peer}" for ours, peer in ratios]
    rows = []
    for size, of in sorted(by_size.items()):
        cells = [_size_words(size)]
        for path in paths:
            if path not in of:
                cells += ["", ""]
                continue
            algorithm = size / median(of[path]) / 1e9
            cells.append(f"{_time_words(min(of[path]))} / {_time_words(median(of[path]))}")
            cells.append(f"{algorithm:.3g} / {algorithm * BUS_FACTOR[collective](world):.3g}")
        for ours, peer in ratios:
            cells.append(f"{median(of[peer]) / median(of[ours]):.1f}" if ours in of and peer in of else "")
        rows.append(cells)
    return "\n".join([f"## {collective}, {world} ranks", "", output.table(header, rows)])


def markdown(record, seconds):
    parts = [output.head("Collectives on one host", record, LEGEND)]
    for world, collective in dict.fromkeys((world, collective) for world, collective, _, _ in seconds):
        parts.append(_table(world, collective, seconds))
    for lost in record["failures"]:
        words = lost.get("skipped") or lost["error"]
        parts.append(f"- Failed: round {lost['round']}, {lost['ranks']} ranks, {lost['program']}: {words}")
    return "\n".join(parts)


def main():
    options = parse_arguments()
    seconds, failures = {}, []
    record = output.new_record() | {"failures": failures}
    _run(options, seconds, failures)
    record["seconds"] = [[*key, values] for key, values in seconds.items()]
    output.write(options, markdown(record, seconds), record)
    sys.exit(int(any("error" in lost for lost in failures)))


if __name__ == "__main__":
    main()
