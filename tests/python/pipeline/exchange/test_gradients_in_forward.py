# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that watch or take gradients between the blocks of a model that is cut into stages."""

import models
import pytest
import torch
from conftest import run_ranks
from stages import WIDTH, drawn

import deeptide
from deeptide.pipeline.errors import PipelineError


class Block(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.linear = drawn(torch.nn.Linear(WIDTH, WIDTH), number)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Watched(torch.nn.Module):
    """Halves the gradient between the second and the third block, and keeps the one before that."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = drawn(torch.nn.Linear(WIDTH, WIDTH), 1), torch.nn.ModuleList(map(Block, range(2, 6)))

    def forward(self, x, labels):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number == 1:
                x.retain_grad()
            if number == 2:
                x.register_hook(lambda gradient: gradient / 2)
            x = block(x)
        return (x - labels).square().mean()


class Forces(Watched):
    """A derivative of what the last block returns with respect to what is before the first."""

    def __init__(self, of_inputs):
        super().__init__()
        self.of_inputs = of_inputs

    def forward(self, x, labels):
        given = x.clone().requires_grad_()
        x = begin = self.first(given)
        for block in self.blocks:
            x = block(x)
        (force,) = torch.autograd.grad(x.sum(), given if self.of_inputs else begin, create_graph=True)
        return (force - labels).square().mean()


def batch():
    draws = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, 3, WIDTH, generator=draws))


def train(world, make, *args):
    settings = models.config(0, gas=2, micro=3, parallel={"pipeline": 2})
    engine = deeptide.initialize(model=make(*args), config=settings, world=world)[0]
    return engine.train_batch(iter([batch()] * 2)).item(), engine.get_global_grad_norm()


def test_a_hook_between_blocks_runs_where_its_gradient_is():
    model = Watched()
    loss = model(*batch())
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    for found in run_ranks(2, train, Watched):
        assert found == pytest.approx((loss.item(), norm.item()), rel=1e-5)


@pytest.mark.parametrize("of_inputs", [True, False])
def test_a_derivative_over_stages_is_refused_with_its_cure(of_inputs):
    with pytest.raises(PipelineError, match=r"torch\.autograd\.grad.*differentiate inside one block"):
        run_ranks(2, train, Forces, of_inputs)
