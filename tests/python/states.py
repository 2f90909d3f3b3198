# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""An engine's whole state, to tell whether something has changed it."""

import models
import torch

import deeptide


def start(world=None, stage=0, model=None, **extra):
    model = models.make_model() if model is None else model
    return deeptide.initialize(model=model, config=models.config(stage, **extra), world=world)[0]


def loss_of(engine, step=0):
    tokens, targets = models.batches(step + 1, 8)[step]
    rank = engine.world.rank
    return engine(tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2])


def train(engine, first=0, last=1):
    for step in range(first, last):
        engine.backward(loss_of(engine, step))
        outcome = engine.step()
    return outcome


def snapshot(engine):
    """Weights, moments and counters. Collective."""
    state = {
        f"{name}/{role}": engine._core.full_state(name, role)
        for name, _ in engine.module.named_parameters()
        for role in ("master", "exp_avg", "exp_avg_sq")
    }
    state.update(engine.module_state_dict())
    return state, (engine.global_steps, engine.skipped_steps, engine.micro_steps, engine.get_lr())


def assert_same(one, other):
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for name, value in one[0].items():
        assert (value is None and other[0][name] is None) or torch.equal(value, other[0][name]), name
