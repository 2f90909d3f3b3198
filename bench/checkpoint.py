#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times saves of a sharded model's state beside a plain direct write, torch.save and torch's DCP; prints Markdown."""

import argparse
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
from pathlib import Path
from statistics import median

import deeptide
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

LEGEND = """\
2 ranks, bf16, AdamW, stage 2: each rank's masters and moments. GB/s: of both ranks' bytes, from the call until all is
durable. Stall: training stands still in the call, in ms per GB of both ranks' bytes. Step: the steps beside a save, as
a multiple of those without one. Medians over the rounds, whose entries follow one another. The direct write has the
same files and block size, two blocks under way per rank. torch.save ends with fsync, as DCP does."""
BLOCK = 8 << 20


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/checkpoint"), help="on the drive to be measured")
    parser.add_argument("--million", type=int, default=300, help="parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=64, help="of a batch: the more, the longer forward and backward")
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
    def __init__(self, options):
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
        }
        self.engine = deeptide.initialize(model=Net(options.million), config=config)[0]
        self.batch = torch.randn(options.rows, 2048, dtype=torch.bfloat16)

    def step(self):
        """Its seconds, and whether a save has ended."""
        start = time.perf_counter()
        self.engine.backward(self.engine(self.batch))
        outcome = self.engine.step()
        return time.perf_counter() - start, outcome.saved != ""


def timed(work):
    dist.barrier()
    start = time.perf_counter()
    work()
    call = time.perf_counter() - start
    dist.barrier()
    return time.perf_counter() - start, call


def write_directly(path, num_bytes):
    """Two threads, each with an aligned block; returns once all is durable."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o666)

    def write(first):
        block = mmap.mmap(-1, BLOCK)
        block[:] = b"x" * BLOCK
        for at in range(first * BLOCK, num_bytes // BLOCK * BLOCK, 2 * BLOCK):
            os.pwrite(file, block, at)

    threads = [threading.Thread(target=write, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.fsync(file)
    os.close(file)


def save_by_torch(state, path):
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def beside(trainer, begin, is_over, alone):
    """(seconds until it is over, seconds of the call, steps' mean as a multiple of `alone`)."""
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
            return time.perf_counter() - start, call, sum(steps) / len(steps) / alone


def rounds_of(trainer, state, options, rank):
    folder = options.folder
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    for _ in range(options.rounds):
        alone = median(trainer.step()[0] for _ in range(3))
        yield "direct write", *timed(lambda: write_directly(folder / f"direct.{rank}", num_bytes)), None
        yield "Deeptide", *timed(lambda: trainer.engine.save_checkpoint(folder, "ours", blocking=True)), None
        begin = lambda: trainer.engine.save_checkpoint(folder, "ours", blocking=False)  # noqa: E731
        yield "Deeptide, beside", *beside(trainer, begin, lambda: False, alone)
        yield "torch.save", *timed(lambda: save_by_torch(state, folder / f"torch.{rank}")), None
        yield "DCP", *timed(lambda: dcp.save(state, checkpoint_id=str(folder / "dcp"))), None
        futures = []
        begin = lambda: futures.append(dcp.async_save(state, checkpoint_id=str(folder / "dcp")))  # noqa: B023, E731
        yield "DCP, async", *beside(trainer, begin, lambda: futures[0].done(), alone)  # noqa: B023


def run_rank(options):
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # each round overwrites it
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    trainer = Trainer(options)
    trainer.step()
    numel = sum(parameter.numel() for parameter in trainer.engine.module.parameters()) // 2
    state = {f"{name}.{rank}": torch.randn(numel) for name in ("master", "exp_avg", "exp_avg_sq")}
    gigabytes = 2 * sum(tensor.nbytes for tensor in state.values()) / 1e9
    found = {}
    for name, *figures in rounds_of(trainer, state, options, rank):
        found.setdefault(name, []).append(figures)
    if rank != 0:
        return
    print(f"{LEGEND}\n\n{gigabytes:.2f} GB\n")
    print("| | GB/s | of the direct write | stall, ms per GB | step |\n|---|---|---|---|---|")
    base = median(gigabytes / total for total, _, _ in found["direct write"])
    for name, figures in found.items():
        speed = median(gigabytes / total for total, _, _ in figures)
        stall = 1000 * median(call for _, call, _ in figures) / gigabytes
        step = "" if figures[0][2] is None else f"{median(step for *_, step in figures):.2f}"
        print(f"| {name} | {speed:.2f} | {100 * speed / base:.0f} % | {stall:.0f} | {step} |")


def main():
    options = parse_arguments()
    if "RANK" in os.environ:
        return run_rank(options)
    options.folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DEEPTIDE_LOG_LEVEL": "warning"}
    environments = [{**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=environment) for environment in environments]
    codes = [rank.wait() for rank in ranks]
    shutil.rmtree(options.folder)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
