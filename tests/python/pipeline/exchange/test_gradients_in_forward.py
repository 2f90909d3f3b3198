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
    settings = models.config(0, gas=2, micro=3, parallel={"pipeline": world.size}, deeptide={"error_grace": 0.2})
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


class Placed(torch.nn.Module):
    """Each block uses the inputs, as those of force fields do."""

    def __init__(self, derive):
        super().__init__()
        self.first = drawn(torch.nn.Linear(WIDTH, WIDTH), 1)
        self.blocks = torch.nn.ModuleList(map(PlacedBlock, range(2, 6)))
        self.head = drawn(torch.nn.Linear(WIDTH, WIDTH), 6)
        self.derive = derive

    def energy(self, given):
        x = self.first(given)
        for block in self.blocks:
            x = block(x, given)
        return x

    def forward(self, x, labels):
        return (globals()[self.derive](self, x) - labels).square().mean()


class PlacedBlock(Block):
    def forward(self, x, given):
        return super().forward(x) + given


def of_inputs(model, x):
    given = x.clone().requires_grad_()
    energy = model.head(model.energy(given)).sum()
    return torch.autograd.grad(energy, given, create_graph=True)[0]


def of_inputs_if_used(model, x):
    given = x.clone().requires_grad_()
    energy = model.head(model.energy(given * 2)).sum()
    return torch.autograd.grad(energy, given, create_graph=True, allow_unused=True)[0]


def by_jacobian(model, x):
    return torch.autograd.functional.vjp(lambda given: model.energy(given).sum(), x, create_graph=True)[1]


def by_transform(model, x):
    return torch.func.grad(lambda given: model.energy(given).sum())(x)


def by_tangent(model, x):
    return torch.func.jvp(model.energy, (x,), (torch.ones_like(x),))[1]


def by_backward(model, x):
    energy = model.energy(x)
    energy.sum().backward(retain_graph=True)
    return energy


@pytest.mark.parametrize(
    "derive",
    [of_inputs, of_inputs_if_used, by_jacobian, by_transform, by_tangent, by_backward],
    ids=lambda function: function.__name__,
)
def test_a_derivative_of_which_stages_have_parts_is_refused(derive):
    with pytest.raises(PipelineError, match=r"differentiate inside one block, or train the model without a pipeline"):
        run_ranks(2, train, Placed, derive.__name__)


def of_hidden(model, x):
    """Differentiates what the last stage alone computes."""
    hidden = torch.nn.functional.gelu(model.energy(x))
    return torch.autograd.grad(model.head(hidden).sum(), hidden, create_graph=True)[0]


def of_weight(model, x):
    energy = model.head(model.energy(x))
    (of_head,) = torch.autograd.grad(energy.square().sum(), model.head.weight, create_graph=True)
    return energy + of_head.norm()


def compared(make, *args):
    model = make(*args)
    loss = model(*batch())
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    for found in run_ranks(2, train, make, *args):
        assert found == pytest.approx((loss.item(), norm.item()), rel=1e-5)


@pytest.mark.parametrize("derive", [of_hidden, of_weight], ids=lambda f: f.__name__)
def test_a_derivative_within_the_last_stage_is_as_without_a_pipeline(derive):
    compared(Placed, derive.__name__)


class Skipped(Watched):
    """Doubles the gradient of what the first block returns, which the end of the forward uses, too."""

    def __init__(self, late):
        super().__init__()
        self.late = late

    def forward(self, x, labels):
        x = early = self.blocks[0](self.first(x))
        if not self.late:
            early.register_hook(lambda gradient: 2 * gradient.clamp(-0.01, 0.01))
        for block in self.blocks[1:]:
            x = block(x)
        if self.late:
            early.register_hook(lambda gradient: 2 * gradient)
        return (x + early - labels).square().mean()


def test_a_hook_of_a_value_that_skips_a_stage_runs_once():
    compared(Skipped, False)


def test_a_hook_that_only_a_later_stage_registers_is_refused():
    with pytest.raises(PipelineError, match=r"hook is registered on the output of 'blocks\.0'.*register it before"):
        run_ranks(2, train, Skipped, True)


class Between(Watched):
    """A value is computed between blocks, of a block's output, and blocks of both stages use it."""

    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def forward(self, x, labels):
        early = self.blocks[0](self.first(x))
        half = early / 2
        if self.watch:
            getattr(half, self.watch)(*[lambda gradient: gradient.clamp(-0.01, 0.01)][: self.watch == "register_hook"])
        x = half
        for block in self.blocks[1:]:
            x = block(x)
        return (x + half - labels).square().mean()


@pytest.mark.parametrize("watch", ["register_hook", "retain_grad"])
def test_a_hook_of_which_stages_would_have_parts_is_refused(watch):
    compared(Between, "")
    with pytest.raises(PipelineError, match=r"between blocks.*each stage that uses it has a part"):
        run_ranks(2, train, Between, watch)


class Written(Watched):
    """The first block's output is written between blocks of a later stage, and used at the end."""

    def forward(self, x, labels):
        early = self.blocks[0](self.first(x))
        x = self.blocks[1](early * 2)
        x = self.blocks[2](x)
        early.mul_(1.5)
        return (self.blocks[3](x) + early - labels).square().mean()


def test_a_value_that_is_written_on_its_way_is_refused():
    with pytest.raises(PipelineError, match=r"output of 'blocks\.0' is written in place.*clone\(\)"):
        run_ranks(4, train, Written)


class Asking(Watched):
    """Takes the type of a block's first parameter, as Transformers' `module.dtype` does."""

    def forward(self, x, labels):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (x - labels.to(next(self.blocks[0].parameters()).dtype)).square().mean()


def test_a_program_that_asks_for_a_parameter_of_another_stage_is_told():
    with pytest.raises(PipelineError, match=r"next\(module\.parameters\(\)\).*another stage has"):
        run_ranks(2, train, Asking)
