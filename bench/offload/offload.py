#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times steps whose optimizer states lie in memory, in files, and in both by "ratio": "auto"; prints Markdown."""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import deeptide
import torch
from torch import nn

LEGEND = """\
One rank, bf16, AdamW. A round steps each engine once, one after the other; whole: forward, backward and step; step: the
last alone. Median over the rounds, and the median of each round's ratio to the engine with its states in memory."""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/swap"), help="on the drive to be measured")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=512, help="of a batch: the more, the longer forward and backward")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


class Net(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x):
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def make(options, offload):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, **({"offload_optimizer": offload} if offload else {})},
    }
    return deeptide.initialize(model=Net(options.width, options.blocks), config=config)[0]


def time_step(engine, batch):
    """Seconds of all, and of step()."""
    begin = time.perf_counter()
    engine.backward(engine(batch))
    middle = time.perf_counter()
    engine.step()
    end = time.perf_counter()
    return end - begin, end - middle


def main():
    options = parse_arguments()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        files = {"device": "nvme", "nvme_path": folder}
        engines = {
            "in memory": make(options, None),
            "in files": make(options, files),
            "automatic": make(options, {**files, "ratio": "auto"}),
        }
        ratio = engines["automatic"]._core.offload_ratio()
        batch = torch.randn(options.rows, options.width, dtype=torch.bfloat16)
        times = {name: [] for name in engines}
        for turn in range(options.rounds + 1):
            for name, engine in engines.items():
                seconds = time_step(engine, batch)
                if turn > 0:  # the first takes pages
                    times[name].append(seconds)
        print(f"{LEGEND}\n\nratio: {ratio:.2f}\n\n| states | whole, s | x | step, s | x |\n|---|---|---|---|---|")
        for name, found in times.items():
            cells = []
            for part in (0, 1):
                ratios = [own[part] / base[part] for own, base in zip(found, times["in memory"], strict=True)]
                cells.append(f"{median(own[part] for own in found):.3f} | {median(ratios):.2f}")
            print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
