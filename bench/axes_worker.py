# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of axes.py: one stage of a GPT under each schedule, here and in torch.distributed.pipelining, by turns.

A step is all micro-batches and an optimizer step. `busy` is the same work of this rank's stage without the other rank.
"""

import argparse
import copy
import json
import time
from pathlib import Path

import deeptide
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional as F

import task
from contenders.zero_config import zero_config
from settings import SIZES

SCHEDULES = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}
CONTENDERS = [f"{maker} {schedule}" for schedule in SCHEDULES for maker in ("deeptide", "torch")]


class Stage(nn.Module):
    """By hand what torch's stages need: a part of the model that takes what the part before returns."""

    def __init__(self, model, begin, end):
        super().__init__()
        self.is_first, self.is_last = begin == 0, end == len(model.blocks)
        self.blocks = model.blocks[begin:end]
        if self.is_first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x):
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Here:
    def __init__(self, model, size, schedule, micro_batches):
        config = zero_config(0, "fp32", size) | {
            "gradient_accumulation_steps": micro_batches,
            "train_micro_batch_size_per_gpu": size.batch,
            "parallel": {"pipeline": dist.get_world_size(), "schedule": schedule},
        }
        config.pop("train_batch_size", None)
        self.engine = deeptide.initialize(model=model, config=config)[0]

    def step(self, x, y, size):
        given = zip(x.split(size.batch), y.split(size.batch), strict=True)
        return self.engine.train_batch(given).item()


class Torch:
    def __init__(self, model, size, schedule, micro_batches, bounds):
        rank = dist.get_rank()
        module = Stage(model, *bounds[rank : rank + 2])
        stage = pipelining.PipelineStage(module, rank, dist.get_world_size(), torch.device("cpu"))
        self.schedule = SCHEDULES[schedule](stage, micro_batches, loss_fn=loss_of)
        self.is_first, self.is_last = module.is_first, module.is_last
        self.optimizer = task.fused_adamw(module.parameters(), size)

    def step(self, x, y, size):
        losses = []
        self.schedule.step(*([x] if self.is_first else []), **({"target": y, "losses": losses} if self.is_last else {}))
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = torch.stack(losses).mean() if self.is_last else torch.zeros(())
        dist.broadcast(loss, dist.get_world_size() - 1)  # as train_batch gives it, on every rank
        return loss.item()


class Busy:
    """This rank's stage alone: its work in a step, and nobody to wait for."""

    def __init__(self, model, size, bounds):
        rank = dist.get_rank()
        self.module = Stage(model, *bounds[rank : rank + 2])
        self.optimizer = task.fused_adamw(self.module.parameters(), size)

    def step(self, x, y, size):
        for tokens, labels in zip(x.split(size.batch), y.split(size.batch), strict=True):
            first = tokens if self.module.is_first else torch.zeros(*tokens.shape, size.width, requires_grad=True)
            out = self.module(first)
            loss = loss_of(out, labels) if self.module.is_last else out.mean()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return 0.0


def measure(options):
    size, count = SIZES[options.model], options.micro_batches
    torch.set_num_threads(1)
    deeptide.init_distributed()
    model = task.make_model(size)
    made = {f"deeptide {s}": Here(copy.deepcopy(model), size, s, count) for s in SCHEDULES}
    bounds = next(iter(made.values())).engine._cut.parts
    made |= {f"torch {s}": Torch(copy.deepcopy(model), size, s, count, bounds) for s in SCHEDULES}
    made["busy"] = Busy(copy.deepcopy(model), size, bounds)
    draws = torch.Generator().manual_seed(1)
    seconds, losses = {name: [] for name in made}, {name: [] for name in made}
    for turn in range(options.warmup + options.steps):
        tokens = torch.randint(0, size.vocabulary, (count * size.batch, size.context + 1), generator=draws)
        names = list(made) if turn % 2 == 0 else list(reversed(made))
        for name in names:
            dist.barrier()
            begin = time.perf_counter()
            loss = made[name].step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), size)
            if turn >= options.warmup:
                seconds[name].append(time.perf_counter() - begin)
            losses[name].append(loss)
    return {"seconds": seconds, "losses": losses, "bounds": bounds}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    options.result.write_text(json.dumps(measure(options)))


if __name__ == "__main__":
    main()
