# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT that is larger than memory: `deeptide --num_ranks 2 examples/gpt/large.py --size 1B --files /nvme`.

Parameters, gradients and optimizer states lie in files; what passes through memory is bounded, and printed first.
"""

from __future__ import annotations

import argparse
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import deeptide
from corpus import load_corpus
from gpt import use_threads
from model import GPT, GPTConfig
from report import memory_table

GIB = 1 << 30
CONTEXT = 128
# Parameters by 12 * layers * width^2: the embedding of 256 byte values is small.
SIZES = {
    "20M": GPTConfig(context=CONTEXT, width=512, layers=6, heads=8),
    "300M": GPTConfig(context=CONTEXT, width=1024, layers=24, heads=16),
    "1B": GPTConfig(context=CONTEXT, width=2048, layers=20, heads=32),
    "3B": GPTConfig(context=CONTEXT, width=2560, layers=38, heads=40),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1B")
    parser.add_argument("--files", type=Path, default=Path("runs/large"), help="folder on a fast drive with room")
    parser.add_argument("--in-memory", action="store_true", help="no files, for comparison: the losses are the same")
    parser.add_argument("--fp32", action="store_true", help="for a processor without bf16 arithmetic")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--data", help="a file or folder of text (default: the source of Python's standard library)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": not args.fp32},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0},
        # Ranks of one host would otherwise have one copy of the parameters, which lies in memory.
        "deeptide": {"shared_memory": False},
    }
    if not args.in_memory:
        rest = {"nvme": "rest"}
        config["zero_optimization"]["offload_param"] = {"device": "none", "buffer_count": 3}
        config["deeptide"]["placement"] = {
            "parameters": rest,
            "gradients": rest,
            "optimizer_states": rest,
            "nvme_path": str(args.files),
        }
    return config


class PeakMemory:
    """The most that this process has held: resident bytes, each page shared with others as its fraction."""

    def __init__(self, interval_s: float = 0.25) -> None:
        self.now = self.peak = 0
        self._interval = interval_s
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def sample(self) -> None:
        found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
        self.now = int(found[1]) * 1024 if found else 0
        self.peak = max(self.peak, self.now)

    def _watch(self) -> None:
        while not self._ended.wait(self._interval):
            self.sample()

    def end(self) -> None:
        self._ended.set()


def held_by_job(engine: deeptide.Engine, memory: PeakMemory, step: int) -> tuple[int, int]:
    """Bytes now, and the sum of the ranks' peaks: the job never held more. On rank 0; called by all."""
    world = engine.world
    memory.sample()
    world.store.set(f"large/{step}/{world.rank}", f"{memory.now} {memory.peak}")
    if world.rank:
        return 0, 0
    ranks = [world.store.get(f"large/{step}/{rank}").split() for rank in range(world.size)]
    return sum(int(now) for now, _ in ranks), sum(int(peak) for _, peak in ranks)


def lies_where(plan: deeptide.MemoryPlan, ranks: int) -> str:
    files = {role: line.file_bytes * ranks / GIB for role, line in plan.lines.items() if line.file_bytes}
    return "; in files: " + ", ".join(f"{role} {size:.2f}" for role, size in files.items()) + " GiB" if files else ""


def train(args: argparse.Namespace, engine: deeptide.Engine, memory: PeakMemory, plan: deeptide.MemoryPlan) -> None:
    world, where = engine.world, lies_where(plan, engine.world.size)
    windows, _ = load_corpus(args.data, CONTEXT)
    for step in range(1, args.steps + 1):
        began = time.monotonic()
        tokens, targets = windows.batch([(step * world.size + world.rank) * 997 % len(windows)], engine.device)
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        now, most = held_by_job(engine, memory, step)
        if world.rank == 0:
            print(
                f"step {step}/{args.steps}  loss {loss.item():.6f}  {time.monotonic() - began:6.1f} s  "
                f"in memory: {now / GIB:.2f} GiB, at most {most / GIB:.2f}{where}",
                flush=True,
            )


def main() -> None:
    args = parse_arguments()
    use_threads(None)
    config, size = configuration(args), SIZES[args.size]
    began = time.monotonic()
    with deeptide.zero.Init():  # no memory yet: initialize makes one unit after another
        model = GPT(size, seed=args.seed)
    ranks, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    plan = deeptide.plan(model, config, ranks)
    if rank == 0:
        print(f"The plan, before anything is allocated:\n{plan}\n", flush=True)
    memory = PeakMemory()
    engine, *_ = deeptide.initialize(model=model, config=config)
    if rank == 0:
        print(f"initialized in {time.monotonic() - began:.1f} s", flush=True)
    train(args, engine, memory, plan)
    if rank == 0:
        print(f"\n{memory_table(engine.memory())}")
        print("Python, torch, activations and autograd's own gradients come on top.")
    memory.end()


if __name__ == "__main__":
    main()
