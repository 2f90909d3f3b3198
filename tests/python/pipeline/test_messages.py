# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""What stages send each other is what it was when it was sent, whatever its layer writes into it afterwards."""

import models
import pytest
import torch
from conftest import run_ranks
from stages import drawn

import deeptide
from deeptide.pipeline import PipelineModule

GAS, WIDTH = 4, 8


class Annealed(torch.nn.Module):
    """Hands on a buffer that its next forward changes in place."""

    def __init__(self):
        super().__init__()
        self.linear = drawn(torch.nn.Linear(WIDTH, WIDTH), 3)
        self.register_buffer("shift", torch.ones(1))

    def forward(self, x):
        self.shift.mul_(0.5)
        return self.linear(x), self.shift


class Shifted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = drawn(torch.nn.Linear(WIDTH, WIDTH), 4)

    def forward(self, given):
        x, shift = given
        return self.linear(x) + shift


class Summed:
    """A loss whose tensor later losses are added to."""

    total = None

    def __call__(self, outputs, labels):
        loss = (outputs - labels).square().mean()
        if self.total is None:
            self.total = loss.detach()
        else:
            self.total += loss.detach()
        return loss


def batches():
    draws = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 3, WIDTH, generator=draws)) for _ in range(GAS)]


def train(world, num_stages, schedule):
    model = PipelineModule([Annealed(), Shifted()], num_stages=num_stages, loss_fn=Summed(), world=world)
    settings = models.config(0, gas=GAS, micro=3, parallel={"schedule": schedule})
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    loss = engine.train_batch(iter(batches())).item()
    return loss, engine.get_global_grad_norm()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_a_buffer_that_its_layer_changes_arrives_as_it_was_when_it_was_sent(schedule):
    layers = torch.nn.Sequential(Annealed(), Shifted())
    losses = [(layers(x) - labels).square().mean() / GAS for x, labels in batches()]
    for loss in losses:
        loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in layers.parameters()]).norm()
    for num_stages in (1, 2):
        for loss, its_norm in run_ranks(num_stages, train, num_stages, schedule):
            assert loss == pytest.approx(sum(losses).item(), rel=1e-6)
            assert its_norm == pytest.approx(norm.item(), rel=1e-6)
