# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers that the program draws outside of the blocks are alike on all stages at any step, or the user is told."""

import random
import re

import numpy
import pytest
import torch
from conftest import run_processes
from test_what_bypasses import GAS, RATE, STEPS, WIDTH, Block, batches, compare, settings, updates
from torch import nn

import deeptide
from deeptide.pipeline.errors import PipelineError


class Denoises(nn.Module):
    """Adds noise to the inputs, from the second step on, and predicts it: the first stage and the last use it."""

    def __init__(self, draw):
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)
        self.draw, self.count = draw, 0

    def forward(self, inputs, mask, labels):
        self.count += 1
        noise = self.draw(inputs.shape) if self.count > GAS else inputs.new_full(inputs.shape, 0.1)
        hidden = self.embed(inputs + noise)
        for block in self.blocks:
            hidden, _ = block(hidden, mask)
        return (self.head(hidden) - noise).square().mean()


def by_python(shape):
    return torch.tensor([random.gauss(0, 1) for _ in range(shape.numel())]).view(shape)


def by_numpy(shape):
    return torch.from_numpy(numpy.random.standard_normal(shape)).float()


DRAWS = {"torch": torch.randn, "python": by_python, "numpy": by_numpy}


def make(name, seed):
    torch.manual_seed(3)
    model = Denoises(DRAWS[name])
    for generator in (random.seed, numpy.random.seed, torch.manual_seed):
        generator(seed)
    return model, {key: value.clone() for key, value in model.state_dict().items()}


def train_alone(name):
    model, before = make(name, 11)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, given = [], batches()
    for _ in range(STEPS):
        each = [model(*next(given)) for _ in range(GAS)]
        (sum(each) / GAS).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(each).item() / GAS)
    return losses, updates(model.state_dict(), before)


def train_cut(name, apart):
    """Compares with torch alone; where stages are seeded `apart`, tells of their error."""
    engine = deeptide.initialize(model=make(name, 11)[0], config=settings(2, schedule="gpipe"))[0]
    rank = torch.distributed.get_rank()
    for generator in (random.seed, numpy.random.seed, torch.manual_seed):
        generator(11 + rank * apart)
    before = {key: value.clone() for key, value in engine.snapshot().state_dict().items()}
    given = batches()
    try:
        losses = [engine.train_batch(given).item() for _ in range(STEPS)]
    except PipelineError as error:
        print(f"{engine.global_steps} steps, then {error}")
        return
    except deeptide.CommError:
        return
    got = losses, updates(engine.snapshot().state_dict(), before)
    compare(got, train_alone(name))
    print("alike")


@pytest.mark.parametrize("name", ["python", "numpy"])
def test_generators_of_python_that_are_seeded_alike_draw_as_uncut(name):
    assert [done.stdout.splitlines()[-1] for done in run_processes(2, train_cut, name, 0)] == ["alike", "alike"]


@pytest.mark.parametrize(
    ("name", "seeds_apart", "text"),
    [
        ("torch", 0, r"aten\.randn\S* draws random numbers before this stage's blocks, .*; draw them in a block"),
        ("python", 1, r"draws numbers of Python's generator or NumPy's outside of the blocks.*alike on all ranks"),
        ("numpy", 1, r"draws numbers of Python's generator or NumPy's outside of the blocks.*alike on all ranks"),
    ],
)
def test_stages_that_would_draw_apart_are_named_at_any_step(name, seeds_apart, text):
    told = "".join(done.stdout for done in run_processes(2, train_cut, name, seeds_apart))
    assert re.search(rf"1 steps, then stage 1 of 2: .*{text}", told), told
