# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of test_deepspeed.py: trains one small model under each configuration, with DeepSpeed or with Deeptide.

Arguments: the framework's module, a file of configurations by name, the file for the losses.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

STEPS, BATCH = 100, 4


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(29, 24),
        nn.Linear(24, 48),
        nn.GELU(),
        nn.LayerNorm(48),
        nn.Linear(48, 48),
        nn.Tanh(),
        nn.Linear(48, 29),
    )


def batches(rank, count):
    """Sequences in which each token follows from the one before, with some noise."""
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        tokens = torch.randint(29, (BATCH, 16), generator=generator)
        noise = torch.randint(3, (BATCH, 16), generator=generator)
        yield tokens, (5 * tokens + noise) % 29


def train(framework, config):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model()
    gas = config["gradient_accumulation_steps"]
    engine, *_ = framework.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for tokens, targets in batches(rank, STEPS * gas):
        scores = engine(tokens).float()
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    steps = torch.stack(losses).view(STEPS, gas).mean(1)
    dist.all_reduce(steps)
    engine.destroy()
    return (steps / world).tolist()


def main():
    name, cases, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    framework = importlib.import_module(name)
    losses = {case: train(framework, config) for case, config in json.loads(Path(cases).read_text()).items()}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(losses))
    dist.barrier()
    os._exit(0)  # DeepSpeed's destructors wait for groups that are gone


if __name__ == "__main__":
    main()
