# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Programs of DeepSpeed's users beside plain torch, under both names, in real processes."""

import copy
import importlib
import os

import models
import pytest
import torch
from conftest import run_processes
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

from deeptide import ConfigError

RATE, STEPS = 0.1, 4


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)

    def forward(self, noise):
        return torch.tanh(self.body(noise))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.body(x)


def interface(name):
    if name == "deepspeed":
        importlib.import_module("deeptide.as_deepspeed")
    return importlib.import_module(name)


def config(stage):
    made = models.config(stage, gradient_clipping=0.0)
    made["optimizer"] = {"type": "SGD", "params": {"lr": RATE}}
    return made


def given(step, rank, ranks):
    """(real, noise) of a rank; of all ranks for rank None."""
    generator = torch.Generator().manual_seed(step)
    real, noise = torch.randn(2 * ranks, 4, generator=generator), torch.randn(2 * ranks, 3, generator=generator)
    rows = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
    return real[rows], noise[rows]


def adversarial(critic, generator, steps, rank, ranks):
    """DeepSpeed's example: the critic's gradients of the generator's backward go by netD.zero_grad().

    steps: (backward, step) of the critic, and of the generator.
    """
    (critic_backward, critic_step), (generator_backward, generator_step) = steps
    losses = []
    for number in range(STEPS):
        real, noise = given(number, rank, ranks)
        critic.zero_grad()
        critic_backward(critic(real).square().mean())
        fake = generator(noise)
        critic_backward((critic(fake.detach()) - 1).square().mean())
        critic_step()
        generator.zero_grad()
        loss = critic(fake).square().mean()
        generator_backward(loss)
        generator_step()
        losses.append(loss.detach())
    return torch.stack(losses)


def plain_adversarial(ranks):
    nets = models.make_model(kind=Critic), models.make_model(kind=Generator)
    optimizers = [torch.optim.SGD(net.parameters(), lr=RATE) for net in nets]
    steps = [(torch.Tensor.backward, optimizer.step) for optimizer in optimizers]
    return adversarial(*nets, steps, None, ranks)


def check_adversarial(name, stage):
    torch.set_num_threads(1)
    nets = models.make_model(kind=Critic), models.make_model(kind=Generator)
    engines = [interface(name).initialize(model=net, config=config(stage))[0] for net in nets]
    rank, ranks = engines[0].global_rank, engines[0].world_size
    steps = [(engine.backward, engine.step) for engine in engines]
    found = adversarial(*nets, steps, rank, ranks)
    expected = plain_adversarial(ranks)
    mean = torch.tensor([engines[0]._core.mean(float(loss)) for loss in found])
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-6)
    for engine in engines:
        engine.destroy()


def check_clipping(name, stage):
    """A loop of plain torch around engine.backward: the norm it logs, and what clipping leaves."""
    torch.set_num_threads(1)
    engine = interface(name).initialize(model=models.make_model(kind=Critic), config=config(stage))[0]
    plain = models.make_model(kind=Critic)
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    rank, ranks = engine.global_rank, engine.world_size
    for number in range(STEPS):
        engine.backward(engine(given(number, rank, ranks)[0]).square().mean())
        norm = clip_grad_norm_(engine.module.parameters(), 0.05)
        assert all(p.grad is not None for p in engine.module.parameters())
        engine.step()
        plain(given(number, None, ranks)[0]).square().mean().backward()
        expected = clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(norm, expected)
    for own, other in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), other.detach(), rtol=1e-5, atol=1e-6)
    engine.destroy()


def check_least(name, stage):
    """The weight moves by what engine.backward gave alone."""
    net = nn.Linear(1, 1, bias=False)
    engine = interface(name).initialize(model=net, config=config(stage))[0]
    before = engine.module_state_dict()["weight"].clone()
    x = torch.ones(2, 1)
    (net(x).sum() * 5).backward()
    net.zero_grad()
    engine.backward(net(x).mean())
    engine.step()
    torch.testing.assert_close(engine.module_state_dict()["weight"], before - RATE)
    engine.destroy()


def check_model_idioms(name, stage):
    """Copies of the model, and an optimizer of torch's beside it, between steps."""
    engine = interface(name).initialize(model=models.make_model(kind=Critic), config=config(stage))[0]
    real, _ = given(0, engine.global_rank, engine.world_size)
    engine.backward(engine(real).square().mean())
    other = torch.optim.AdamW(engine.module.parameters())
    with pytest.raises(ConfigError, match=r"engine\.step\(\) in its place"):
        other.step()
    engine.step()
    other.step()  # nothing is left to step
    expected = engine.module_state_dict()
    averaged = AveragedModel(engine.module)
    averaged.update_parameters(engine.module)
    for copied in (copy.deepcopy(engine.module), averaged.module):
        state = copied.state_dict()
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=0)
    engine.module.share_memory()
    with pytest.raises(ValueError, match="share_memory"):
        engine.backward(engine(real).square().mean())
        engine.step()
    os._exit(0)  # its peers have raised, too: there is no end together


def check_scaling(name, stage):
    """Torch's GradScaler around an engine: the weights move as without it."""
    engine, optimizer, *_ = interface(name).initialize(model=models.make_model(kind=Critic), config=config(stage))
    plain = models.make_model(kind=Critic)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    rank, ranks = engine.global_rank, engine.world_size
    for number in range(STEPS):
        engine.backward(scaler.scale(engine(given(number, rank, ranks)[0]).square().mean()))
        scaler.unscale_(optimizer)
        engine.step()
        scaler.update()
        plain(given(number, None, ranks)[0]).square().mean().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    for own, other in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), other.detach(), rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["deeptide", "deepspeed"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_adversarial_loop_trains_as_in_torch(ranks, name, stage):
    run_processes(ranks, check_adversarial, name, stage)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", ["deeptide", "deepspeed"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_that_clips_trains_as_in_torch(ranks, name, stage):
    run_processes(ranks, check_clipping, name, stage)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["deeptide", "deepspeed"])
def test_what_was_there_before_zero_grad_moves_nothing(name, stage):
    run_processes(1, check_least, name, stage)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["deeptide", "deepspeed"])
def test_models_are_copied_whole_and_foreign_optimizers_are_named(name, stage):
    run_processes(2, check_model_idioms, name, stage)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", ["deeptide", "deepspeed"])
def test_a_loop_with_a_scaler_trains_as_in_torch(name, stage):
    run_processes(2, check_scaling, name, stage)
