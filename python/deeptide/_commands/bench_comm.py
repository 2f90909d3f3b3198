# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of `deeptide bench comm`, which starts it and checks its arguments; rank 0 prints what the core measured."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from deeptide import _C
from deeptide._process.world import find_world

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collectives", type=lambda text: text.split(","), required=True)
    parser.add_argument("--sizes", type=lambda text: [int(word) for word in text.split(",")], required=True)
    parser.add_argument("--dtype", choices=_DTYPES, required=True)
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--warmups", type=int, required=True)
    parser.add_argument("--bw-unit", choices=("GBps", "Gbps"), required=True)
    parser.add_argument("--format", choices=("table", "raw", "json"), required=True)
    parser.add_argument("--no-shared-memory", action="store_true")
    return parser.parse_args()


def _device() -> torch.device:
    """This rank's GPU, if there are any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    place = _C.find_place(_C.DistributedOptions())
    index = (place.local_rank if place else 0) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _row(collective: str, times: _C.CollectiveTimes, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The fields of one line; bandwidths are of the median time, as nccl-tests define them."""
    middle = median(times.seconds)
    algorithm = times.bytes / middle / 1e9 * (8 if options.bw_unit == "Gbps" else 1)
    return {
        "collective": collective,
        "bytes": times.bytes,
        "best_us": min(times.seconds) * 1e6,
        "median_us": middle * 1e6,
        "algbw": algorithm,
        "busbw": algorithm * _C.bus_factor(collective, world_size),
    }


def _with_unit(value: float, *units: tuple[float, str]) -> str:
    """The value in the largest of the units, (factor, name), that leaves it above 1."""
    factor, name = max((unit for unit in units if value >= unit[0]), default=units[0])
    return f"{value / factor:.4g} {name}"


def _cells(row: dict[str, Any], raw: bool) -> list[str]:
    if raw:
        return [row["bytes"], f"{row['best_us']:.2f}", f"{row['median_us']:.2f}"]
    return [
        _with_unit(row["bytes"], (1, "B"), (1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB")),
        *(_with_unit(row[name], (1, "us"), (1e3, "ms"), (1e6, "s")) for name in ("best_us", "median_us")),
    ]


def _print(row: dict[str, Any], options: argparse.Namespace) -> None:
    if options.format == "json":
        print(json.dumps(row), flush=True)
        return
    cells = [*_cells(row, options.format == "raw"), f"{row['algbw']:.3g}", f"{row['busbw']:.3g}"]
    print("".join(f"{cell:>14}" for cell in cells), flush=True)


def _print_head(collective: str, where: str, options: argparse.Namespace) -> None:
    if options.format == "json":
        return
    note = "; a reduce-scatter, then an all-gather" if collective == "all-reduce" else ""
    print(f"\n{collective}, {where}{note}")
    units = ("(bytes)", "(us)", "(us)") if options.format == "raw" else ("", "", "")
    names = [f"{name}{unit}" for name, unit in zip(("size", "best", "median"), units, strict=True)]
    print(
        "".join(f"{cell:>14}" for cell in (*names, f"algbw {options.bw_unit}", f"busbw {options.bw_unit}")), flush=True
    )


@contextlib.contextmanager
def _no_lines_of_gloo() -> Iterator[None]:
    """Up to torch 2.10 Gloo prints a line for each group that connects: to standard error, not among the results."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def main() -> None:
    options = _parse_arguments()
    torch.set_num_threads(1)  # the ranks are the parallelism
    _C.install_cpu_allocator()  # as an engine does
    device = _device()
    with _no_lines_of_gloo():
        # No process group of torch's where none is needed: on CPUs the core's own transports do all.
        world, _groups = (_C.init_distributed(), ()) if device.type == "cpu" else find_world(None, device)
        shared = not options.no_shared_memory
        bench = _C.CollectiveBench(world, _DTYPES[options.dtype], device, max(options.sizes), shared)
    hosts = bench.num_hosts
    place = {"ranks": world.size, "hosts": hosts, "path": bench.path, "dtype": options.dtype}
    where = f"{world.size} ranks on {hosts} host{'s' * (hosts > 1)}, {options.dtype}, {bench.path}"
    for collective in options.collectives:
        if world.rank == 0:
            _print_head(collective, where, options)
        for size in options.sizes:
            times = bench.measure(collective, size, options.warmups, options.trials)
            if world.rank == 0:
                _print(_row(collective, times, world.size, options) | place | {"bw_unit": options.bw_unit}, options)


if __name__ == "__main__":
    main()
