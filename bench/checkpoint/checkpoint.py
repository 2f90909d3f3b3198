#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times saves, loads, exports and imports of a sharded model's state beside fio, torch, DCP and DeepSpeed: Markdown.

DeepSpeed's and fio's rows are there where these are installed (`bench/run.sh checkpoint` installs DeepSpeed).
"""

import argparse
import importlib.util
import logging
import mmap
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import deeptide
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deeptide._model.weights import import_checkpoint
from torch import nn

from jobs import script

LEGEND = """\
2 ranks, {dtype}, AdamW, stage 2: each rank's masters and moments. GB/s: of both ranks' bytes, from the call until all
is durable; DeepSpeed's are without the weights that it writes as well, and it does not sync. Stall: training stands
still in the call, in ms per GB of both ranks' bytes. Step: the steps beside a save, as a multiple of those without one.
Medians over the rounds, whose entries follow one another. The direct write has the same files and block size, two
blocks under way per rank. torch.save ends with fsync, as DCP does. Memory: the peak of a rank's resident memory in the
call beyond what it had before, in percent of its state. Reads begin with no page of the files in memory; a load of
Deeptide compares every block with its hash. An engine that has trained does so before anything changes, and again as it
reads, unless `checkpoint.verify` is false. An export is of weights in fp32, from masters, by rank 0 alone, its
bytes counted once; so is its direct write. An import writes what DeepSpeed has saved in Deeptide's form, by rank 0
alone; its bytes are those of the masters and moments. Both read as much as they write: so does the direct copy."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BLOCK = 8 << 20
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
HAS_FIO = shutil.which("fio") is not None


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/checkpoint"), help="on the drive to be measured")
    parser.add_argument("--million", type=int, default=300, help="parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=64, help="of a batch: the more, the longer forward and backward")
    has_bf16 = any(flag in Path("/proc/cpuinfo").read_text() for flag in ("avx512_bf16", "amx_bf16"))
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16" if has_bf16 else "fp32")
    return parser.parse_args()


class Net(nn.Module):
    def __init__(self, million, width=2048):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(width, width) for _ in range(max(1, million * 10**6 // width**2)))

    def forward(self, x):
        for layer in self.h:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


class Trainer:
    """Steps of one engine: Deeptide's, or DeepSpeed's."""

    def __init__(self, options, initialize, **settings):
        torch.manual_seed(0)
        model = Net(options.million)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "bf16": {"enabled": options.dtype == "bf16"},
            "zero_optimization": {"stage": 2},
            **settings,
        }
        self.numel = sum(parameter.numel() for parameter in model.parameters())
        self.engine = initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        self.batch = torch.randn(options.rows, 2048, dtype=DTYPES[options.dtype])

    def step(self):
        """Its seconds, and whether a save has ended."""
        start = time.perf_counter()
        self.engine.backward(self.engine(self.batch))
        outcome = self.engine.step()
        return time.perf_counter() - start, getattr(outcome, "saved", "") != ""


class Bench(NamedTuple):
    """Holds all that a rank measures with."""

    options: argparse.Namespace
    rank: int
    ours: Trainer
    theirs: Trainer | None  # DeepSpeed's
    state: dict[str, torch.Tensor]  # as much as a rank saves

    @property
    def num_bytes(self):
        """Counts one rank's bytes."""
        return sum(tensor.nbytes for tensor in self.state.values())


def timed(work):
    """(seconds until all ranks are done, seconds of the call, None, this rank's peak of memory in bytes)."""
    dist.barrier()
    start = time.perf_counter()
    with Peak() as peak:
        work()
    call = time.perf_counter() - start
    dist.barrier()
    return time.perf_counter() - start, call, None, peak.bytes


def on_two_threads(work):
    threads = [threading.Thread(target=work, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def write_directly(path, num_bytes):
    """Two threads, each with an aligned block; returns once all is durable."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o666)

    def write(first):
        block = mmap.mmap(-1, BLOCK)
        block[:] = b"x" * BLOCK
        for at in range(first * BLOCK, num_bytes // BLOCK * BLOCK, 2 * BLOCK):
            os.pwrite(file, block, at)

    on_two_threads(write)
    os.fsync(file)
    os.close(file)


def read_directly(path):
    """Two threads, as write_directly has."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size = os.fstat(file).st_size

    def read(first):
        block = mmap.mmap(-1, BLOCK)
        for at in range(first * BLOCK, size, 2 * BLOCK):
            os.preadv(file, [block], at)

    on_two_threads(read)
    os.close(file)


def copy_directly(source, target):
    """Two threads, each of which writes what it has read, so that the drive does both at once; ends durable."""
    read = os.open(source, os.O_RDONLY | os.O_DIRECT)
    written = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o666)
    size = os.fstat(read).st_size

    def copy(first):
        block = mmap.mmap(-1, BLOCK)
        for at in range(first * BLOCK, size, 2 * BLOCK):
            os.preadv(read, [block], at)
            os.pwrite(written, block, at)

    on_two_threads(copy)
    os.fsync(written)
    os.close(read)
    os.close(written)


def forget_pages(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def resident_bytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


class Peak:
    """The peak of this process's memory beyond what it had, in bytes."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")
        self.before = resident_bytes("VmRSS:")
        return self

    def __exit__(self, *ignored):
        self.bytes = resident_bytes("VmHWM:") - self.before


def save_by_torch(state, path):
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def beside(trainer, begin, is_over, alone):
    """(seconds until it is over, seconds of the call, steps' mean as a multiple of `alone`, None)."""
    dist.barrier()
    start = time.perf_counter()
    begin()
    call = time.perf_counter() - start
    steps = []
    while True:
        seconds, saved = trainer.step()
        steps.append(seconds)
        over = torch.tensor(int(saved or is_over()))
        dist.all_reduce(over, dist.ReduceOp.MIN)
        if over:
            return time.perf_counter() - start, call, sum(steps) / len(steps) / alone, None


def begin_fio(folder, num_bytes):
    """Starts what does what write_directly does, for both ranks' files."""
    asked = {"rw": "write", "bs": BLOCK, "direct": 1, "ioengine": "libaio", "iodepth": 2, "end_fsync": 1}
    asked |= {"directory": folder, "name": "fio", "numjobs": 2, "size": num_bytes // BLOCK * BLOCK}
    for path in folder.glob("fio.*"):
        path.unlink()  # else it fills them first
    command = ["fio", "--group_reporting", "--minimal", *(f"--{key}={value}" for key, value in asked.items())]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


class FioBeside:
    """Runs fio's write on rank 0 beside other work."""

    def __init__(self, bench):
        self.bench = bench
        self.write = None

    def begin(self):
        if self.bench.rank == 0:
            self.write = begin_fio(self.bench.options.folder, self.bench.num_bytes)

    def is_over(self):
        return self.write is None or self.write.poll() is not None


def rounds_of(bench):
    """(name, total, call, steps' multiple, memory) of each save."""
    folder, rank, trainer, state = bench.options.folder, bench.rank, bench.ours, bench.state
    where, futures = {"checkpoint_id": str(folder / "dcp")}, []
    own_group = dist.new_group()  # whose calls on DCP's thread do not mix with those of `beside`
    for _ in range(bench.options.rounds):
        alone = median(trainer.step()[0] for _ in range(3))
        yield "direct write", *timed(lambda: write_directly(folder / f"direct.{rank}", bench.num_bytes))
        if HAS_FIO:
            yield "fio", *timed(lambda: rank == 0 and begin_fio(folder, bench.num_bytes).wait())
            fio = FioBeside(bench)
            yield "fio, beside", *beside(trainer, fio.begin, fio.is_over, alone)
        yield "Deeptide", *timed(lambda: trainer.engine.save_checkpoint(folder, "ours", blocking=True))
        begin = lambda: trainer.engine.save_checkpoint(folder, "ours", blocking=False)  # noqa: E731
        yield "Deeptide, beside", *beside(trainer, begin, lambda: False, alone)
        yield "torch.save", *timed(lambda: save_by_torch(state, folder / f"torch.{rank}"))
        yield "DCP", *timed(lambda: dcp.save(state, **where))
        begin = lambda: futures.append(dcp.async_save(state, process_group=own_group, **where))  # noqa: E731
        yield "DCP, async", *beside(trainer, begin, lambda: futures[-1].done(), alone)
        if bench.theirs is not None:
            yield "DeepSpeed", *timed(lambda: bench.theirs.engine.save_checkpoint(str(folder / "theirs"), tag="theirs"))


def reads_of(bench):
    """Reads what the last round of saves has left, into memory that has been used."""
    folder, rank, state = bench.options.folder, bench.rank, bench.state
    other = Trainer(bench.options, deeptide.initialize, checkpoint={"verify": False}).engine
    other.load_checkpoint(folder, "ours")
    reads = {
        "direct read": lambda: read_directly(folder / f"direct.{rank}"),
        "Deeptide, load": lambda: bench.ours.engine.load_checkpoint(folder, "ours"),
        "Deeptide, load without verify": lambda: other.load_checkpoint(folder, "ours"),
        "torch.load": lambda: torch.load(folder / f"torch.{rank}"),
        "DCP, load": lambda: dcp.load(state, checkpoint_id=str(folder / "dcp")),
    }
    if bench.theirs is not None:
        reads["DeepSpeed, load"] = lambda: bench.theirs.engine.load_checkpoint(str(folder / "theirs"), tag="theirs")
        reads["Deeptide, load of DeepSpeed's"] = lambda: bench.ours.engine.load_checkpoint(folder / "theirs", "theirs")
    for _ in range(bench.options.rounds):
        for name, read in reads.items():
            forget_pages(folder)
            yield name, *timed(read)
    other.destroy()


def exports_of(bench):
    """By one process, as `deeptide checkpoint export` and `import` run: (name, bytes, seconds, memory)."""
    folder, num_bytes = bench.options.folder, 4 * bench.ours.numel
    export = partial(deeptide.checkpoint.export, folder / "ours", folder / "export", dtype="fp32")
    works = {"export": (num_bytes, export)}
    if bench.theirs is not None:
        works["import"] = (3 * num_bytes, partial(import_checkpoint, folder / "theirs", folder / "imported", "theirs"))
    for _ in range(bench.options.rounds if bench.rank == 0 else 0):
        for name, (size, work) in works.items():
            shutil.rmtree(folder / "imported", ignore_errors=True)
            forget_pages(folder)
            start = time.perf_counter()
            with Peak() as peak:
                work()
                for written in ("export", "imported"):
                    forget_pages(folder / written)  # durable
            yield name, size, time.perf_counter() - start, peak.bytes
            start = time.perf_counter()
            write_directly(folder / "direct.export", size)
            yield f"direct write, {name}", size, time.perf_counter() - start, 0
            start = time.perf_counter()
            copy_directly(folder / "direct.export", folder / "direct.copy")
            yield f"direct copy, {name}", size, time.perf_counter() - start, 0
    dist.barrier()


def print_reads(found, gigabytes, state_bytes):
    print("\n| | GB/s | of the direct read | memory |\n|---|---|---|---|")
    base = median(gigabytes / total for total, *_ in found["direct read"])
    for name, figures in found.items():
        speed = median(gigabytes / total for total, *_ in figures)
        memory = 100 * median(peak for *_, peak in figures) / state_bytes
        print(f"| {name} | {speed:.2f} | {100 * speed / base:.0f} % | {memory:.0f} % |")


def print_exports(found):
    print("\n| | GB/s | memory, MiB |\n|---|---|---|")
    for name, figures in found.items():
        speed = median(num_bytes / 1e9 / seconds for num_bytes, seconds, _ in figures)
        print(f"| {name} | {speed:.2f} | {median(peak for *_, peak in figures) / 2**20:.0f} |")


def collected(rows, say):
    """The figures of each name; each is told as it comes."""
    found = {}
    for name, *figures in rows:
        say(f"{name}: {', '.join(f'{value:.4g}' for value in figures if value is not None)}")
        found.setdefault(name, []).append(figures)
    return found


def print_saves(found, gigabytes, state_bytes, dtype):
    print(f"{LEGEND.format(dtype=dtype)}\n\n{gigabytes:.2f} GB\n")
    print("| | GB/s | of the direct write | stall, ms per GB | step | memory |\n|---|---|---|---|---|---|")
    base = median(gigabytes / total for total, *_ in found["direct write"])
    for name, figures in found.items():
        speed = median(gigabytes / total for total, *_ in figures)
        stall = 1000 * median(call for _, call, *_ in figures) / gigabytes
        step = "" if figures[0][2] is None else f"{median(step for _, _, step, _ in figures):.2f}"
        memory = "" if figures[0][3] is None else f"{100 * median(peak for *_, peak in figures) / state_bytes:.0f} %"
        print(f"| {name} | {speed:.2f} | {100 * speed / base:.0f} % | {stall:.0f} | {step} | {memory} |")


def run_rank(options):
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # each round overwrites it
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    say = partial(print, file=sys.stderr, flush=True) if rank == 0 else lambda text: None
    trainers = [Trainer(options, deeptide.initialize), deepspeed_trainer(options)]
    for trainer in filter(None, trainers):
        trainer.step()
    state = {f"{name}.{rank}": torch.randn(trainers[0].numel // 2) for name in ("master", "exp_avg", "exp_avg_sq")}
    bench = Bench(options, rank, *trainers, state)
    saves = collected(rounds_of(bench), say)
    reads = collected(reads_of(bench), say)
    exports = collected(exports_of(bench), say)
    if rank == 0:
        print_saves(saves, 2 * bench.num_bytes / 1e9, bench.num_bytes, options.dtype)
        print_reads(reads, 2 * bench.num_bytes / 1e9, bench.num_bytes)
        print_exports(exports)
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # DeepSpeed's destructors wait for groups that are gone


def deepspeed_trainer(options):
    if not HAS_DEEPSPEED:
        return None
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed

    return Trainer(options, deepspeed.initialize)


def main():
    options = parse_arguments()
    if "RANK" in os.environ:
        return run_rank(options)
    options.folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DEEPTIDE_LOG_LEVEL": "warning"}
    environments = [{**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    ranks = [subprocess.Popen([*script("checkpoint"), *sys.argv[1:]], env=environment) for environment in environments]
    codes = [rank.wait() for rank in ranks]
    shutil.rmtree(options.folder)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
