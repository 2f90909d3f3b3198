# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks with different numbers of micro-batches, which set the boundary by hand: steps are plain torch's."""

import threading

import edges
import pytest
import torch
from conftest import run_ranks

COUNTS = ((3, 5), (4, 1), (2, 2))  # micro-batches of each rank, by step
GAS = 4  # of the configuration, by which each loss is divided


def micro_batch(rank, step, index):
    return edges.inputs(rank, 10 * step + index)


def loss_of(module, rank, step, index):
    return module(micro_batch(rank, step, index)).square().mean()


def train_unevenly(world, stage, barrier, steps_between):
    engine = edges.start(world, stage, gas=GAS)
    for step, counts in enumerate(COUNTS):
        for index in range(counts[world.rank]):
            last = index == counts[world.rank] - 1
            engine.set_gradient_accumulation_boundary(last)
            if last and barrier is not None:
                barrier.wait(20)  # of the program's own: whoever waited in a step() would not come here
            engine.backward(loss_of(engine, world.rank, step, index))
            if last or steps_between:
                outcome = engine.step()
        assert outcome.applied and engine.global_steps == step + 1
    return edges.final_state(engine)


def plainly():
    model, optimizer = edges.plain()
    for step, counts in enumerate(COUNTS):
        losses = [loss_of(model, rank, step, index) / GAS for rank, n in enumerate(counts) for index in range(n)]
        edges.plain_update(model, optimizer, losses, len(counts))
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_trained_alike(states):
    for name, expected in plainly().items():
        for state in states:
            torch.testing.assert_close(state[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", edges.STAGES)
def test_ranks_with_different_numbers_of_micro_batches_train_as_plain_torch(stage):
    assert_trained_alike(run_ranks(2, train_unevenly, stage, None, True))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_that_is_no_boundary_waits_for_nobody(stage):
    assert_trained_alike(run_ranks(2, train_unevenly, stage, threading.Barrier(2), True))


@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_may_leave_out_the_steps_between(stage):
    assert_trained_alike(run_ranks(2, lambda world: train_unevenly(world, stage, None, world.rank == 0)))


def join_within(world, stage):
    """Rank 1 has no more batches when rank 0 begins an accumulation by the count."""
    engine = edges.start(world, stage, gas=3)
    for step in range(2 if world.rank == 0 else 1):
        for index in range(3):
            engine.backward(loss_of(engine, world.rank, step, index))
            engine.step()
    engine.join()
    assert engine.global_steps == 2
    return edges.final_state(engine)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_that_has_joined_takes_part_in_the_boundary_alone(stage):
    model, optimizer = edges.plain()
    for step, ranks in enumerate(((0, 1), (0,))):
        losses = [loss_of(model, rank, step, index) / 3 for rank in ranks for index in range(3)]
        edges.plain_update(model, optimizer, losses, 2)
    for state in run_ranks(2, join_within, stage):
        for name, p in model.named_parameters():
            torch.testing.assert_close(state[name], p.detach(), rtol=1e-5, atol=1e-6)
