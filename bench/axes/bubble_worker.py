# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of bubble.py: a stage whose layers sleep as long as its part of a step would take."""

import argparse
import json
import time
from pathlib import Path

import deeptide
import torch
from deeptide.pipeline import LayerSpec, PipelineModule
from torch import nn

WIDTH = 8


class Sleep(torch.autograd.Function):
    """Forward and the gradient of the input, each as long as given."""

    @staticmethod
    def forward(context, x, seconds):
        context.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.seconds)
        return gradient.clone(), None


class Layer(nn.Linear):
    """Sleeps the same for forward, for its input's gradient and for its weight's."""

    def __init__(self, seconds):
        super().__init__(WIDTH, WIDTH, bias=False)
        self.seconds = seconds
        self.weight.register_hook(self._sleep)

    def _sleep(self, gradient):
        time.sleep(self.seconds)

    def forward(self, x):
        return super().forward(Sleep.apply(x.requires_grad_(), self.seconds))


def measure(options):
    deeptide.init_distributed()
    stages, chunks = torch.distributed.get_world_size(), options.chunks if options.schedule == "interleaved" else 1
    layers = [LayerSpec(Layer, options.seconds / chunks) for _ in range(stages * chunks)]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": options.micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "parallel": {"schedule": options.schedule},
    }
    module = PipelineModule(
        layers,
        num_stages=stages,
        chunks=chunks,
        loss_fn=lambda output, _: output.square().mean(),
        partition_method="uniform",
    )
    engine = deeptide.initialize(model=module, config=config)[0]
    seconds, bubbles = [], []
    for step in range(options.warmup + options.steps):
        given = iter([(torch.ones(1, WIDTH), torch.zeros(1))] * options.micro_batches)
        begin = time.perf_counter()
        engine.train_batch(given)
        if step >= options.warmup:
            seconds.append(time.perf_counter() - begin)
            bubbles.append(engine.bubble().measured)
    return {"seconds": seconds, "bubbles": bubbles, "formula": engine.bubble().formula}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--chunks", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    options.result.write_text(json.dumps(measure(options)))


if __name__ == "__main__":
    main()
