#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times what passes between files and memory in a step of offloaded states, beside fio; prints Markdown."""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import output

SLOTS = 12  # blocks of 4 MiB under way or in use, as for Adam by default
FIO = {"read": ["--rw=read"], "write": ["--rw=write"], "update": ["--rw=rw", "--rwmixread=50"]}
LEGEND = """\
Blocks of 4 MiB of three buffers with O_DIRECT; update: each block is read, then written. fio: the same folder, block
size and number under way, by io_uring. GB/s: all bytes that pass in either direction; best and median over the rounds,
which alternate; share: each round's, then the median."""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--program", default=str(output.ROOT / "build" / "bench" / "deeptide_swap_bench"))
    parser.add_argument("--folder", type=Path, default=Path("runs/swap"), help="on the drive to be measured")
    parser.add_argument("--gib", type=float, default=6.0, help="of states")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def output_of(command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)


def by_deeptide(options, pattern):
    found = output_of([options.program, options.folder, options.gib, SLOTS, pattern])
    return found["bytes"] / found["seconds"] / 1e9


def run_fio(options, pattern):
    command = ["fio", "--name=swap", f"--filename={options.folder}/fio", f"--size={int(options.gib * 1024)}M"]
    command += ["--bs=4M", f"--iodepth={SLOTS}", "--direct=1", "--ioengine=io_uring", "--output-format=json"]
    return output_of([*command, *FIO[pattern]])["jobs"][0]


def by_fio(options, pattern):
    job = run_fio(options, pattern)
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    return moved / (job["job_runtime"] / 1000) / 1e9


def main():
    options = parse_arguments()
    if shutil.which("fio") is None:
        sys.exit("bench swap compares with fio, which is not installed: apt-get install fio")
    options.folder.mkdir(parents=True, exist_ok=True)
    run_fio(options, "write")  # a hole would not be read from the drive
    print(f"{LEGEND}\n\n| pattern | fio, GB/s | Deeptide, GB/s | share |\n|---|---|---|---|")
    for pattern in FIO:
        pairs = [(by_fio(options, pattern), by_deeptide(options, pattern)) for _ in range(options.rounds)]
        fio, ours = zip(*pairs, strict=True)
        share = 100 * median(b / a for a, b in pairs)
        speeds = " | ".join(f"{max(found):.2f}, {median(found):.2f}" for found in (fio, ours))
        print(f"| {pattern} | {speeds} | {share:.0f} % |", flush=True)
    (options.folder / "fio").unlink()


if __name__ == "__main__":
    main()
