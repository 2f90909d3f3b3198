# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of one contender of axes.py: a stage of a GPT under a schedule, here or in another library.

A step is all micro-batches and an optimizer step. `busy` is the same work of this rank's stage without the other rank.
"""

import argparse
import importlib.util
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional as F

import task
from axes.by_turns import TUNED, add_worker_arguments, step_by_turns
from contenders.zero_config import zero_config
from settings import SIZES

SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,  # of one stage per rank: ZB-H1
}
BUSY = f"busy{TUNED}"
SET_UP_SECONDS = 120  # that one contender may take until it knows the cut


HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def contenders(schedules):
    """Names: who runs a schedule. The others have glibc's allocator as it is, and one that keeps its memory."""
    names = [name for each in schedules for name in (f"deeptide {each}", f"torch {each}", f"torch {each}{TUNED}")]
    return names + (["deepspeed 1f1b", f"deepspeed 1f1b{TUNED}"] if HAS_DEEPSPEED and "1f1b" in schedules else [])


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
    def __init__(self, model, size, schedule, micro_batches, chunks):
        import deeptide

        deeptide.init_distributed()
        parallel = {"pipeline": dist.get_world_size(), "schedule": schedule}
        config = zero_config(0, "fp32", size) | {
            "gradient_accumulation_steps": micro_batches,
            "train_micro_batch_size_per_gpu": size.batch,
            "parallel": parallel | ({"chunks": chunks} if schedule == "interleaved" else {}),
        }
        config.pop("train_batch_size", None)
        self.engine = deeptide.initialize(model=model, config=config)[0]

    def step(self, x, y, size):
        given = zip(x.split(size.batch), y.split(size.batch), strict=True)
        return self.engine.train_batch(given).item()


class Torch:
    def __init__(self, model, size, schedule, micro_batches, bounds):
        count = len(bounds) - 1
        modules = modules_of(model, bounds)
        stages = [
            pipelining.PipelineStage(module, part, count, torch.device("cpu")) for part, module in modules.items()
        ]
        is_single = schedule in ("1f1b", "gpipe")
        self.schedule = SCHEDULES[schedule](stages[0] if is_single else stages, micro_batches, loss_fn=loss_of)
        self.is_first, self.is_last = 0 in modules, count - 1 in modules
        self.optimizer = task.fused_adamw(torch.nn.ModuleList(modules.values()).parameters(), size)

    def step(self, x, y, size):
        losses = []
        self.schedule.step(*([x] if self.is_first else []), **({"target": y, "losses": losses} if self.is_last else {}))
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = torch.stack(losses).mean() if self.is_last else torch.zeros(())
        dist.broadcast(loss, dist.get_world_size() - 1)  # as train_batch gives it, on every rank
        return loss.item()


class DeepSpeed:
    """Its PipelineEngine, of one layer for each stage."""

    def __init__(self, model, size, micro_batches, bounds):
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.init_distributed(dist_backend="gloo")  # adopts the group that is there
        layers = [Stage(model, *bounds[part : part + 2]) for part in range(len(bounds) - 1)]
        config = zero_config(0, "fp32", size) | {
            "train_batch_size": micro_batches * size.batch,
            "gradient_accumulation_steps": micro_batches,
            "train_micro_batch_size_per_gpu": size.batch,
        }
        module = PipelineModule(layers, num_stages=len(layers), loss_fn=loss_of, partition_method="uniform")
        parameters = [p for p in module.parameters() if p.requires_grad]
        self.engine = deepspeed.initialize(model=module, model_parameters=parameters, config=config)[0]

    def step(self, x, y, size):
        given = zip(x.split(size.batch), y.split(size.batch), strict=True)
        return self.engine.train_batch(given).item()


def modules_of(model, bounds):
    """This rank's parts of the model, by number."""
    parts = range(dist.get_rank(), len(bounds) - 1, dist.get_world_size())
    return {part: Stage(model, *bounds[part : part + 2]) for part in parts}


class Busy:
    """This rank's stage alone: its work in a step, and nobody to wait for."""

    def __init__(self, model, size, bounds):
        self.modules = torch.nn.ModuleList(modules_of(model, bounds).values())
        self.optimizer = task.fused_adamw(self.modules.parameters(), size)

    def step(self, x, y, size):
        for tokens, labels in zip(x.split(size.batch), y.split(size.batch), strict=True):
            for module in self.modules:
                first = tokens if module.is_first else torch.zeros(*tokens.shape, size.width, requires_grad=True)
                out = module(first)
                loss = loss_of(out, labels) if module.is_last else out.mean()
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return 0.0


def cut_of(options, schedule, cut=None):
    """Bounds of the parts: Deeptide's `cut`, written down for the others, who wait for it."""
    written = Path(options.turns, f"{schedule}.json")
    if cut is not None:
        if dist.get_rank() == 0:
            being_written = written.with_suffix(".new")
            being_written.write_text(json.dumps(cut))
            being_written.rename(written)
        return cut
    end = time.monotonic() + SET_UP_SECONDS
    while not written.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"no cut for {schedule} after {SET_UP_SECONDS} s")
        time.sleep(0.1)
    return json.loads(written.read_text())


def make(options):
    """The contender that the options name."""
    size, count = SIZES[options.model], options.micro_batches
    maker, _, schedule = options.name.removesuffix(TUNED).partition(" ")
    model = task.make_model(size)
    if maker == "deeptide":
        here = Here(model, size, schedule, count, options.chunks)
        cut_of(options, schedule, here.engine._cut.parts)
        return here
    dist.init_process_group("gloo")
    if maker == "torch":
        return Torch(model, size, schedule, count, cut_of(options, schedule))
    if maker == "deepspeed":
        return DeepSpeed(model, size, count, cut_of(options, schedule))
    return Busy(model, size, cut_of(options, options.schedule.split(",")[0]))


def measure(options):
    size, count = SIZES[options.model], options.micro_batches
    torch.set_num_threads(1)
    contender = make(options)
    torch.set_num_threads(1)  # again: a framework may have set its own number
    draws = torch.Generator().manual_seed(1)

    def draw():
        tokens = torch.randint(0, size.vocabulary, (count * size.batch, size.context + 1), generator=draws)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), size

    return step_by_turns(contender, draw, options)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--schedule", required=True)
    parser.add_argument("--chunks", type=int, required=True)
    add_worker_arguments(parser)
    options = parser.parse_args()
    options.result.write_text(json.dumps(measure(options)))


if __name__ == "__main__":
    main()
