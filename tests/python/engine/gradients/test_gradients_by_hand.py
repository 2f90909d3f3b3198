# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients that lie in `.grad` on some ranks, while others compute theirs, and are far ahead in their reductions."""

import models
import pytest
import torch
from conftest import run_ranks

import deeptide

LAYERS, TIMEOUT = 12, 20  # more units than others wait for at once; seconds


def gradients_of(model):
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def train(world, stage, backwards, by_hand, only):
    """One step in which rank 0 has gradients of the parameters that `only` names, put there, or by a backward."""
    config = models.config(stage, deeptide={"unit_size": 1, "comm_timeout": TIMEOUT})
    model = models.make_model(layers=LAYERS)
    given = {name: gradient for name, gradient in gradients_of(model).items() if only in name}
    engine = deeptide.initialize(model=model, config=config, world=world)[0]
    if world.rank == 1:
        batch = models.batches(1, 2, seed=3)[0]
        for _ in range(backwards):
            engine.backward(engine(*batch))
    elif by_hand:
        for name, parameter in model.named_parameters():
            if name in given:
                parameter.grad = given[name]
    else:
        engine.backward(sum((p * given[name]).sum() for name, p in model.named_parameters() if name in given))
    outcome = engine.step()
    states = {name: value.clone() for name, value in models.everything(engine).items()}
    engine.destroy()
    return outcome.grad_norm, states


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("only", ["", "h.11.up", "h.3.up.bias"], ids=["all", "last", "one"])
def test_a_rank_that_is_ahead_gets_the_gradients_that_lie_on_another(stage, backwards, only):
    found = run_ranks(2, train, stage, backwards, True, only)
    wanted = run_ranks(2, train, stage, backwards, False, only)
    for (norm, states), (expected, others) in zip(found, wanted, strict=True):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert states.keys() == others.keys()
        for name, value in states.items():
            torch.testing.assert_close(value, others[name], rtol=1e-5, atol=1e-6)
