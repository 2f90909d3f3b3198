# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The drift guard: ranks that hold different copies of one tensor are told, made equal, or stopped."""

import models
import pytest
import torch
from conftest import run_ranks

import deeptide

pytestmark = pytest.mark.apart  # ranks that share their parameters have one copy of them


def start(world, stage=0, frozen=False, bf16=False, zero=None, **guard):
    model = models.make_model()
    if frozen:
        model.norm.requires_grad_(False)
    config = models.config(stage, bf16=bf16, deeptide=guard, zero=zero or {})
    return deeptide.initialize(model=model, config=config, world=world)[0]


def step(engine, number):
    rank, size = engine.world.rank, engine.world.size
    tokens, targets = models.batches(number + 1, 4 * size)[number]
    part = slice(4 * rank, 4 * rank + 4)
    engine.backward(engine(tokens[part], targets[part]))
    return engine.step()


def write_alone(engine, rank=1):
    """One rank changes a parameter, as a program must not."""
    if engine.world.rank == rank:
        with torch.no_grad():
            engine.module.norm.weight.add_(0.5)


def copies_of(engine):
    """This rank's own copies."""
    return [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.parametrize(("stage", "frozen"), [(0, False), (0, True), (2, True)])
def test_stop_names_the_parameter_and_the_ranks(stage, frozen):
    def run(world):
        engine = start(world, stage, frozen, drift_interval=2, on_drift="stop")
        step(engine, 0)
        step(engine, 1)
        write_alone(engine)
        assert step(engine, 2)  # not due
        with pytest.raises(deeptide.DriftError, match=r"after 4 applied .* is 'norm.weight', on rank 0 and rank 1"):
            step(engine, 3)

    run_ranks(3, run)


@pytest.mark.parametrize("bf16", [False, True])
def test_sync_makes_copies_and_moments_equal_to_the_first_ranks(bf16):
    def run(world):
        engine = start(world, 0, bf16=bf16, drift_interval=1, on_drift="sync")
        step(engine, 0)
        write_alone(engine)
        step(engine, 1)  # differs, and is mended
        after = copies_of(engine)
        step(engine, 2)
        return after, copies_of(engine)

    first, *others = run_ranks(3, run)
    for other in others:
        for mine, its in zip((*first[0], *first[1]), (*other[0], *other[1]), strict=True):
            assert torch.equal(mine, its)


def test_warn_goes_on_and_equal_ranks_hear_nothing(capfd):
    def run(world):
        engine = start(world, 0, drift_interval=1)
        step(engine, 0)
        if world.rank == 0:
            assert "differ between ranks" not in capfd.readouterr().err
        write_alone(engine)
        assert step(engine, 1)

    run_ranks(2, run)
    assert "replicated tensors differ between ranks; the first is" in capfd.readouterr().err


def test_a_step_that_finds_drift_counts_for_the_programs_schedule_too():
    def run(world):
        model = models.make_model()
        config = models.config(0, deeptide={"drift_interval": 1, "on_drift": "stop"})
        engine, _, _, schedule = deeptide.initialize(
            model=model,
            config=config,
            world=world,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        )
        step(engine, 0)
        write_alone(engine)
        with pytest.raises(deeptide.DriftError):
            step(engine, 1)
        assert engine.global_steps == 2
        assert schedule.last_epoch == 2

    run_ranks(2, run)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_published_from_shards_does_not_drift(stage):
    """Small ones lie whole on each rank at stage 3 too. A write to a frozen one shows that the guard has looked."""

    def run(world):
        persist = {"stage3_param_persistence_threshold": 100}
        engine = start(world, stage, frozen=True, drift_interval=1, on_drift="stop", zero=persist)
        for number in range(3):
            assert step(engine, number)
        write_alone(engine)
        with pytest.raises(deeptide.DriftError, match=r"after 4 applied .* is 'norm.weight', on rank 0 and rank 1"):
            step(engine, 3)

    run_ranks(2, run)
