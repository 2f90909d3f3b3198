# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Schedules of the program's own: the rates after a resume are those of the run that nobody interrupted."""

import copy

import models
import pytest
import torch
from conftest import run_ranks
from torch.optim import lr_scheduler

import deeptide
from deeptide.efficiency.variable_batches import lr_scheduler_for_variable_batch_size

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
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-1, 4, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "SequentialLR": sequence,
    "transformers": warmup_of_transformers,
    "VariableBatchSizeLR": lambda optimizer: lr_scheduler_for_variable_batch_size(4, [2, 4, 8], None, optimizer),
}


def train(engine, first, count):
    rates = []
    for step in range(first, first + count):
        tokens = torch.randint(37, (4, 7), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
        rates.append([engine.get_lr(), [(group["lr"], *group["betas"]) for group in engine.optimizer.param_groups]])
    return rates


def interrupt(world, name, stage, folder):
    def start():
        model = models.make_model()
        return deeptide.initialize(model=model, config=models.config(stage), lr_scheduler=SCHEDULES[name], world=world)[
            0
        ]

    engine = start()
    train(engine, 0, STEPS)
    engine.optimizer.param_groups[0]["lr"] *= 3  # by hand, for the next step
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


def one_cycle(world):
    """OneCycleLR moves the first beta against the rate, as on torch's optimizer."""
    model = models.make_model()
    plain = copy.deepcopy(model)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = lr_scheduler.OneCycleLR(reference, max_lr=0.05, total_steps=8)
    settings = models.config(2, gradient_clipping=0.0)
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}
    engine = deeptide.initialize(
        model=model,
        config=settings,
        world=world,
        lr_scheduler=lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=8),
    )[0]
    for step in range(6):
        tokens = torch.randint(37, (4, 7), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
        plain(tokens[:, :-1], tokens[:, 1:]).backward()
        reference.step()
        schedule.step()
        reference.zero_grad()
        group, wanted = engine.optimizer.param_groups[0], reference.param_groups[0]
        assert (group["lr"], *group["betas"]) == pytest.approx((wanted["lr"], *wanted["betas"]))
    for name, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_one_cycle_moves_the_momentum_as_on_torchs_optimizer():
    run_ranks(1, one_cycle)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_after_a_resume_are_the_uninterrupted_runs(name, stage, tmp_path):
    run_ranks(2, interrupt, name, stage, str(tmp_path))
