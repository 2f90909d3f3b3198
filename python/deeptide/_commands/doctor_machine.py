# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Measures this machine for `deeptide doctor JOB`: products, a triad and the link, by ranks at once; the drive."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from statistics import median

import torch

from deeptide import _C
from deeptide._commands.bench_comm import _device as own_device
from deeptide._commands.bench_comm import _no_lines_of_gloo
from deeptide._process.world import find_world

_LINK_BYTES = 16 << 20
_DRIVE = ("--io_size", "64M", "--io_parallel", "2", "--loops", "2")
_LIMIT_S = 300


@dataclass(frozen=True)
class Machine:
    """Rates of one rank, while as many as the job has here do the same. Units: per second; zeros: not measured."""

    flops: float
    memory_bytes: float
    link_bytes: float  # that a rank sends in an all-reduce; 0 of one rank
    write_bytes: float
    read_bytes: float


def measure(launcher: str, where: list[str], dtype: str, folder: str) -> Machine:
    """Starts a job; the drive is this machine's. Errors: RuntimeError with what a measurement printed.

    where: the launcher's options that say how many ranks it has, and on which hosts.
    """
    words = ["-q", *where, "--python", sys.executable, "--module", "deeptide._commands.doctor_machine", dtype]
    lines = [json.loads(line[line.index("{") :]) for line in _run(launcher, *words).splitlines() if "{" in line]
    drive = [_run(launcher, "bench", "io", "--folder", folder, *_DRIVE, *way) for way in ((), ("--read",))]
    write, read = (float(re.findall(r": ([\d.]+) GB/s", text)[0]) * 1e9 for text in drive)
    flops, memory, link = (min(line[name] for line in lines) for name in ("flops", "memory_bytes", "link_bytes"))
    return Machine(flops, memory, link, write, read)  # a step waits for the slowest rank


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"deeptide doctor: '{' '.join(words[1:4])}' failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """One rank: prints what it measured."""
    device = own_device()
    with _no_lines_of_gloo():
        world, _groups = (_C.init_distributed(), ()) if device.type == "cpu" else find_world(None, device)
    dtype, link = getattr(torch, sys.argv[1]), 0.0
    if world.size > 1:
        bench = _C.CollectiveBench(world, torch.float32, device, _LINK_BYTES, True)
        times = bench.measure("all-reduce", _LINK_BYTES, 2, 5)
        link = times.bytes * _C.bus_factor("all-reduce", world.size) / median(times.seconds)
    peak = _C.measure_peak(device, dtype)  # the ranks leave the last exchange together, and measure at once
    print(json.dumps({"flops": peak.flops_per_s, "memory_bytes": peak.bytes_per_s, "link_bytes": link}), flush=True)


if __name__ == "__main__":
    main()
