# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that do different things neither hang nor get other numbers than plain torch."""

import itertools
import random
import zlib

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide

pytestmark = pytest.mark.both_ways

STEPS = 4
WORLDS = [2, 3]
STAGES = [0, 1, 2, 3]
WIDTH = 10
# Sums of other order, magnified by Adam, as in test_stages; fewer steps here.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


class Branches(nn.Module):
    """A trunk, branches that a caller picks from, blocks that it may skip, and a layer that nobody uses."""

    def __init__(self):
        super().__init__()
        self.trunk = models.Block(WIDTH)
        self.branches = nn.ModuleList(models.Block(WIDTH) for _ in range(3))
        self.unused = nn.Linear(WIDTH, 7)
        self.tail = models.Block(WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, branches=(0, 1, 2), skip_tail=False):
        x = self.trunk(x)
        for i in branches:
            x = self.branches[i](x)
        return self.head(x if skip_tail else self.tail(x))


def inputs(*place, rows=3):
    generator = torch.Generator().manual_seed(zlib.crc32(repr(place).encode()))
    return torch.randn(rows, WIDTH, generator=generator).to(models.DEVICE)


# -- what a rank does in a step: yields losses, each to be propagated before the next is computed ---------------------


def random_branch(model, rank, step):
    picks = random.Random(f"{rank} {step}")
    branches = picks.sample(range(3), picks.randint(0, 3))
    yield model(inputs(rank, step), branches).square().mean()


def skipped_block(model, rank, step):
    yield model(inputs(rank, step), skip_tail=rank == 1).square().mean()


def several_losses(model, rank, step):
    first, second = model(inputs(rank, step)), model(inputs(rank, step, 1), branches=[rank % 3])
    yield first.square().mean()
    yield second.square().mean()
    yield model(inputs(rank, step, 2)).abs().mean()


def backwards_in_different_number(model, rank, step):
    for i in range((rank + step) % 3):
        yield model(inputs(rank, step, i), branches=[i, rank % 3]).square().mean()


def evaluation_in_between(model, rank, step):
    loss = model(inputs(rank, step)).square().mean()
    model.eval()
    with torch.no_grad():
        for i in range(2 * rank + step % 2):
            model(inputs(rank, step, i), branches=[(rank + i) % 3])
    model.train()
    yield loss
    with torch.inference_mode():
        for i in range((rank + 1) % 2):
            model(inputs(rank, step, i))


def generation_in_between(model, rank, step):
    with torch.no_grad():
        sequence = [inputs(rank, step, rows=1)]
        while len(sequence) < 2 + 3 * rank:
            sequence.append(sequence[-1] + model(sequence[-1]))
    yield model(torch.cat(sequence)).square().mean()


SCENARIOS = [
    random_branch,
    skipped_block,
    several_losses,
    backwards_in_different_number,
    evaluation_in_between,
    generation_in_between,
]


def trained(model, engine):
    weights = {name: engine._core.full_state(name, "master") for name, _ in model.named_parameters()}
    engine.destroy()
    return weights


def train(world, stage, scenario, gas=1, plain_backward=False, **zero):
    model = models.make_model(kind=Branches)
    cfg = models.config(stage, gas=gas, zero=zero)
    engine, *_ = deeptide.initialize(model=model, config=cfg, world=world)
    for step in range(STEPS * gas):
        for loss in scenario(model, world.rank, step):
            loss.backward() if plain_backward else engine.backward(loss)
        assert bool(engine.step()) == (step % gas == gas - 1)
    return trained(model, engine)


class Plain:
    """A single process that sees every rank's losses: the mean is over all ranks, also those without a gradient."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)

    def step(self, ranks, gas=1):
        for p in self.parameters:
            if p.grad is not None:
                p.grad /= ranks * gas
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def reference(world, scenario, gas=1, steps=STEPS):
    model = models.make_model(kind=Branches)
    plain = Plain(model.parameters())
    for step in range(steps * gas):
        for rank in range(world):
            for loss in scenario(model, rank, step):
                loss.backward()
        if step % gas == gas - 1:
            plain.step(world, gas)
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_close(ranks, expected):
    for weights in ranks:
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, msg=lambda text, n=name: f"{n}: {text}", **TOLERANCE)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_divergent_ranks_train_as_plain_torch(stage, world, scenario):
    assert_close(run_ranks(world, train, stage, scenario), reference(world, scenario))


@pytest.mark.parametrize("scenario", [random_branch, backwards_in_different_number], ids=lambda s: s.__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_divergent_ranks_accumulate_as_plain_torch(stage, scenario):
    ranks = run_ranks(2, train, stage, scenario, 3, True)
    assert_close(ranks, reference(2, scenario, gas=3))


@pytest.mark.parametrize("scenario", [random_branch, several_losses], ids=lambda s: s.__name__)
def test_loss_backward_is_engine_backward(scenario):
    for one, other in zip(run_ranks(2, train, 3, scenario), run_ranks(2, train, 3, scenario, 1, True), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_small_budget_serves_divergent_ranks(overlap):
    ranks = run_ranks(
        3,
        lambda world: train(
            world, 3, random_branch, stage3_max_live_parameters=1, stage3_max_reuse_distance=1, overlap_comm=overlap
        ),
    )
    assert_close(ranks, reference(3, random_branch))


def train_with_second_thoughts(world, stage, gas):
    """Before each loss that counts, losses that zero_grad drops again: as many as the rank likes."""
    model = models.make_model(kind=Branches)
    engine, *_ = deeptide.initialize(model=model, config=models.config(stage, gas=gas), world=world)
    for step in range(STEPS * gas):
        if step % gas == 0:
            for i in range((world.rank + step // gas) % 3):
                engine.backward(model(inputs(world.rank, step, i), branches=[i]).abs().mean())
            engine.zero_grad()
        (loss,) = random_branch(model, world.rank, step)
        engine.backward(loss)
        engine.step()
    return trained(model, engine)


@pytest.mark.parametrize("gas", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_drops_gradients_in_different_number(stage, gas):
    assert_close(run_ranks(3, train_with_second_thoughts, stage, gas), reference(3, random_branch, gas))


# -- join: batches in different number --------------------------------------------------------------------------------


def uneven(model, rank, step):
    if step < 1 + 2 * rank:
        yield from random_branch(model, rank, step)


def train_and_join(world, stage, gas=1, scheduler=None):
    model = models.make_model(kind=Branches)
    engine, *_ = deeptide.initialize(
        model=model, config=models.config(stage, gas=gas), world=world, lr_scheduler=scheduler
    )
    for step in itertools.count():
        if step % gas == 0 and step < 1 + 2 * world.rank:
            engine.zero_grad()  # as many loops do; ranks that have joined follow
        losses = list(uneven(model, world.rank, step))
        if not losses:
            break
        engine.backward(losses[0])
        engine.step()
    engine.join()
    assert engine.global_steps == (2 * world.size - 1) // gas
    rates = engine.get_lr()
    return trained(model, engine), rates


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_joined_ranks_take_part_until_all_have_joined(stage, world):
    ranks = run_ranks(world, train_and_join, stage)
    assert_close([weights for weights, _ in ranks], reference(world, uneven, steps=2 * world - 1))


@pytest.mark.parametrize("stage", STAGES)
def test_joined_ranks_take_part_within_an_accumulation(stage):
    ranks = run_ranks(2, train_and_join, stage, 3)
    assert_close([weights for weights, _ in ranks], reference(2, uneven, gas=3, steps=1))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_callers_schedule_advances_on_joined_ranks(stage):
    def halve(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    ranks = run_ranks(3, train_and_join, stage, 1, halve)
    assert [rates for _, rates in ranks] == [[1e-2 * 0.5**5]] * 3
    assert all(torch.equal(ranks[0][0][name], ranks[2][0][name]) for name in ranks[0][0])
