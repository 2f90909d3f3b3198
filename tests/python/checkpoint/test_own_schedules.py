# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Schedules of the program's own: the rates after a resume are those of the run that nobody interrupted."""

import models
import pytest
import torch
from conftest import run_ranks
from torch.optim import lr_scheduler

import deeptide

STEPS, FURTHER = 3, 6


def sequence(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


def warmup_of_transformers(optimizer):
    from transformers.optimization import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(optimizer, 2, 12)


SCHEDULES = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=12, cycle_momentum=False
    ),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-1, 4, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "SequentialLR": sequence,
    "transformers": warmup_of_transformers,
}


def train(engine, first, count):
    rates = []
    for step in range(first, first + count):
        tokens = torch.randint(37, (4, 7), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
        rates.append([engine.get_lr(), [group["lr"] for group in engine.optimizer.param_groups]])
    return rates


def interrupt(world, name, stage, folder):
    def start():
        model = models.make_model()
        return deeptide.initialize(model=model, config=models.config(stage), lr_scheduler=SCHEDULES[name], world=world)[
            0
        ]

    engine = start()
    train(engine, 0, STEPS)
    engine.save_checkpoint(folder)
    expected = train(engine, STEPS, FURTHER)
    weights = engine.module_state_dict()
    assert len({rates[0][0] for rates in expected}) > 1  # they move
    resumed = start()
    train(resumed, 90, 1)  # its own schedule is elsewhere
    resumed.load_checkpoint(folder)
    assert train(resumed, STEPS, FURTHER) == expected
    for key, value in resumed.module_state_dict().items():
        assert torch.equal(value, weights[key]), key


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_after_a_resume_are_the_uninterrupted_runs(name, stage, tmp_path):
    run_ranks(2, interrupt, name, stage, str(tmp_path))
