# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Random numbers of a rank, whoever draws them: alike on stages that read a batch, and where a forward runs again.

Ranks are processes: as threads they would share the generators.
"""

import json
import random

import models
import numpy
import pytest
import torch
from conftest import run_processes, run_ranks
from skipping import Unet, UnetBlock
from stages import VOCABULARY, WIDTH, drawn, loss_of

import deeptide
from deeptide._process import generators
from deeptide.pipeline import PipelineModule

GAS, STEPS = 3, 2


def all_draws():
    return torch.rand(1).item(), random.gauss(0, 1), numpy.random.standard_normal(), random.random()


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def test_states_are_of_all_generators_in_the_middle_of_a_pair_of_normal_numbers():
    seed(3)
    all_draws()
    held, text = generators.states(), generators.of_interpreter()
    expected = all_draws()
    assert not generators.are_equal(held, generators.states())
    generators.set_states(held)
    assert all_draws() == expected
    all_draws()
    with generators.kept():
        all_draws()
    generators.set_interpreter(text)
    assert all_draws()[1:] == expected[1:]


class Masked(torch.utils.data.Dataset):
    """Samples whose labels are what a mask of the collator's hides, drawn from all generators."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.arange(8) * (index + 3) % VOCABULARY


def masked(samples):
    tokens = torch.stack(samples)
    hidden = torch.rand(tokens.shape) < 0.4
    hidden[random.randrange(len(tokens)), numpy.random.randint(8)] = True
    return torch.where(hidden, 1, tokens), torch.where(hidden, tokens, -100)


class Block(torch.nn.Module):
    """The second one moves its stage's generators, as dropout does, and its output does not depend on that."""

    def __init__(self, number, draws):
        super().__init__()
        self.linear, self.draws = drawn(torch.nn.Linear(WIDTH, WIDTH), number), draws

    def forward(self, x):
        if self.draws:
            all_draws()
        return torch.tanh(self.linear(x))


def layers(draws):
    embedding, head = drawn(torch.nn.Embedding(VOCABULARY, WIDTH), 1), drawn(torch.nn.Linear(WIDTH, VOCABULARY), 2)
    return [embedding, Block(3, False), Block(4, draws), head]


def train_on_drawn_masks(kind, num_stages):
    """Prints losses and norms. On one rank nothing but the batches draws."""
    loader = torch.utils.data.DataLoader(Masked(), batch_size=2, collate_fn=masked)
    settings = models.config(0, gas=GAS, micro=2)
    if kind == "layers":
        model = PipelineModule(layers(num_stages > 1), num_stages=num_stages, loss_fn=loss_of)
        arguments = {}
    else:
        model, arguments = torch.nn.Sequential(*layers(num_stages > 1)), {"loss_fn": loss_of}
        settings = {**settings, "parallel": {"pipeline": num_stages}} if num_stages > 1 else settings
    engine = deeptide.initialize(model=model, config=settings)[0]
    seed(5 + engine.world.rank)
    batches = iter(deeptide.RepeatingLoader(loader))
    losses_and_norms = (
        [engine.train_batch(batches, **arguments).item(), engine.get_global_grad_norm()] for _ in range(STEPS)
    )
    print(json.dumps(list(losses_and_norms)))


@pytest.mark.parametrize("kind", ["layers", "model"])
def test_stages_draw_a_batch_alike(kind):
    alone = json.loads(run_processes(1, train_on_drawn_masks, kind, 1)[0].stdout)
    for process in run_processes(2, train_on_drawn_masks, kind, 2):
        for got, expected in zip(json.loads(process.stdout), alone, strict=True):
            assert got == pytest.approx(expected, rel=1e-5)


class Noisy(UnetBlock):
    """Draws from all generators but the device's."""

    def forward(self, hidden, skip=None):
        scale = torch.rand_like(hidden) + random.random() + numpy.random.standard_normal()
        return super().forward(hidden * scale, skip)


def noisy_unet():
    model = Unet(half=2)
    model.blocks[0] = Noisy(12)
    return drawn(model, 6)


def train_a_unet(num_stages):
    """Prints losses and norms. The first stage alone draws; the last one asks for what skips it in a second forward."""
    settings = models.config(0, gas=GAS, micro=2)
    settings = {**settings, "parallel": {"pipeline": num_stages}} if num_stages > 1 else settings
    engine = deeptide.initialize(model=noisy_unet(), config=settings)[0]
    seed(5)
    found = []
    for _ in range(STEPS):
        tokens = torch.arange(10).reshape(2, 5) % VOCABULARY
        loss = engine.train_batch(iter([(tokens, tokens.roll(1, 1))] * GAS))
        found.append([loss.item(), engine.get_global_grad_norm()])
    print(json.dumps(found))


def test_a_forward_that_is_made_again_draws_what_it_drew_before():
    alone = json.loads(run_processes(1, train_a_unet, 1)[0].stdout)
    for process in run_processes(2, train_a_unet, 2):
        for got, expected in zip(json.loads(process.stdout), alone, strict=True):
            assert got == pytest.approx(expected, rel=1e-4)


class Noise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = drawn(torch.nn.Linear(WIDTH, WIDTH), 9)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * (random.random() + numpy.random.standard_normal() + torch.rand_like(x))


def recomputed(world, kind):
    """(loss, norm) of a step, and the numbers that come next."""
    settings = models.config(0, gas=1, micro=2)
    loss_fn = {}
    model = torch.nn.Sequential(*(Noise() for _ in range(3)))
    if kind == "layers" or kind == "layers kept":
        interval = 0 if kind == "layers kept" else 2
        blocks = list(model)
        model = PipelineModule(blocks, 1, loss_fn=mean_of, activation_checkpoint_interval=interval, world=world)
    else:
        loss_fn = {"loss_fn": mean_of}
        if kind != "kept":
            settings["activation_checkpointing"] = {"policy": kind}
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    seed(7)
    draws = torch.Generator().manual_seed(2)
    loss = engine.train_batch(iter([tuple(torch.randn(2, 2, WIDTH, generator=draws))]), **loss_fn).item()
    return loss, engine.get_global_grad_norm(), all_draws()


def mean_of(outputs, labels):
    return (outputs - labels).square().mean()


@pytest.mark.parametrize("kinds", [("kept", "recompute"), ("layers kept", "layers")])
def test_blocks_that_are_computed_again_draw_what_they_drew_before(kinds):
    kept, again = (run_ranks(1, recomputed, kind)[0] for kind in kinds)
    assert again == kept


def test_a_checkpoint_has_the_states_of_all_generators(tmp_path):
    def save(world):
        engine = deeptide.initialize(model=torch.nn.Linear(3, 3), config=models.config(0), world=world)[0]
        seed(1)
        all_draws()
        engine.save_checkpoint(str(tmp_path))
        expected = all_draws()
        all_draws()
        engine.load_checkpoint(str(tmp_path))
        return expected, all_draws()

    expected, found = run_ranks(1, save)[0]
    assert found == expected
