# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""An activation policy beside what programs do themselves: their own recomputation, and writes before backward."""

import gc

import models
import pytest
import torch
from conftest import run_ranks
from states import start
from test_activations import Living
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

STEPS = 3
POLICIES = {
    "recompute": {"policy": "recompute"},
    "small": {"policy": "auto", "memory": "64KiB"},
    "large": {"policy": "auto", "memory": "1GiB"},
}


class Counting(models.Block):
    """Counts its runs, and has statistics that each of them moves."""

    def __init__(self, width):
        super().__init__(width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


class Checkpointing(models.TinyModel):
    """Recomputes its blocks itself; their statistics then take each batch twice, as in plain torch."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Counting(20) for _ in range(3))

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def train_checkpointing(world, activations):
    model = models.make_model(kind=Checkpointing)
    engine = start(world, 1, model, **({"activation_checkpointing": activations} if activations else {}))
    for step in range(STEPS):
        engine.backward(engine(*models.batches(1, 2, seed=step)[0]))
        engine.step()
    states = {name: value.clone() for name, value in models.everything(engine).items()}
    engine.destroy()
    return states, sum(block.runs for block in model.h)


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_the_program_recomputes_are_left_to_it(policy):
    [(states, runs)] = run_ranks(1, train_checkpointing, POLICIES[policy])
    [(wanted, plain)] = run_ranks(1, train_checkpointing, None)
    assert runs == plain == 2 * 3 * STEPS
    models.assert_same(states, wanted)


def write_before_backward(world, activations, name):
    model = models.make_model()
    engine = start(world, 0, model, activation_checkpointing=activations)
    for _ in range(2):
        loss = engine(*models.batches(1, 2)[0])
        with torch.no_grad():
            model.get_parameter(name)[0] += 1
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* is at version \d+; expected"):
            engine.backward(loss)
        engine.zero_grad()
    engine.destroy()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["norm.weight", "h.1.up.weight"])
def test_what_is_written_between_forward_and_backward_is_noticed(policy, name):
    """By torch, by hooks that stand where torch would compare versions, or by a block that is recomputed."""
    run_ranks(1, write_before_backward, POLICIES[policy], name)


class Squashing(models.TinyModel):
    """Autograd keeps outputs of its own operators: of tanh, in a block and beside them."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(3))

    def forward(self, tokens, targets):
        x = self.embed(tokens).tanh()
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, -2), targets.flatten())


def drop_a_loss(world, activations):
    model = models.make_model(kind=Squashing)
    engine = start(world, 0, model, **({"activation_checkpointing": activations} if activations else {}))
    with Living(model) as living:
        engine(*models.batches(1, 2)[0])  # its loss has no backward
        gc.collect()
        left = living.now()
    engine.destroy()
    return left


@pytest.mark.parametrize("policy", [*POLICIES, "files"])
def test_a_loss_that_is_dropped_without_backward_leaves_nothing(policy, tmp_path):
    """A tensor that its own operator keeps would be held by itself."""
    activations = POLICIES.get(policy, {"policy": "files", "nvme_path": str(tmp_path)})
    assert run_ranks(1, drop_a_loss, activations) == [0]
