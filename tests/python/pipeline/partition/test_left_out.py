# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A program that calls none of a stage's blocks, in some micro-batches or in evaluation, gives what it does uncut."""

import families
import pytest
import torch
from conftest import run_ranks
from test_any_model import GAS, compare
from test_by_operator import made
from torch import nn
from torch.nn import functional as F

import deeptide
import operators

# Runs of six blocks; each of three stages has two. The last step calls none of the second and the third stage.
RUNS = [(0, 6), (0, 2), (4, 6), (2, 4), (0, 4), (3, 4), (2, 6), (5, 6), (0, 2), (0, 2), (0, 2), (0, 2)]
STEPS = len(RUNS) // GAS


class Depths(nn.Module):
    """Runs the blocks that a batch says."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(families.VOCABULARY, 12), nn.Linear(12, families.VOCABULARY)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(6))

    def forward(self, tokens, labels, first, last):
        hidden = self.embed(tokens)
        for block in self.blocks[first:last]:
            hidden = self.step(block, hidden)
        hidden = F.dropout(hidden, 1e-9, self.training)  # draws numbers, and drops nothing
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    def step(self, block, hidden):
        return hidden + block(hidden)


class GivenMore(Depths):
    """Blocks are given the embedding as well."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Bilinear(12, 12, 12) for _ in range(6))

    def forward(self, tokens, labels, first, last):
        hidden = embedded = self.embed(tokens)
        for block in self.blocks[first:last]:
            hidden = block(hidden, embedded).tanh()
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Recomputed(Depths):
    def step(self, block, hidden):
        return torch.utils.checkpoint.checkpoint(super().step, block, hidden, use_reentrant=False)


def step_by_hand(engine, given):
    """One step by the program's own loop; returns its mean loss."""
    losses = []
    for _ in range(GAS):
        losses.append(engine(*next(given)))
        engine.backward(losses[-1])
        engine.step()
    return torch.stack([loss.detach() for loss in losses]).mean()


def run(world, kind, settings, by_hand=False):
    engine = deeptide.initialize(model=made(kind)(None), config=settings, world=world)[0]
    rank = engine.data_parallel_rank
    given = families.batches("plain", rank, engine.data_parallel_size, STEPS, GAS)
    given = iter([(*batch, *RUNS[number - rank]) for number, batch in enumerate(given)])  # others on each data rank
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append((step_by_hand(engine, given) if by_hand else engine.train_batch(given)).item())
        norms.append(engine.get_global_grad_norm())
    last = [(*batch, *RUNS[1]) for batch in families.batches("plain", 0, 1, 1, GAS)]
    losses.append(engine.eval_batch(iter(last)).item())
    return losses, norms, families.states_of(engine)


def both(kind, num_stages, data_size=1, stage=0, by_hand=False, **more):
    settings = families.config(stage, GAS, num_stages, **more)
    cut = run_ranks(num_stages * data_size, run, kind, settings, by_hand)
    return cut, run_ranks(data_size, run, kind, families.config(stage, GAS))


@pytest.mark.parametrize("kind", [Depths, GivenMore, Recomputed])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble", "interleaved"])
def test_micro_batches_may_leave_out_all_blocks_of_a_stage(kind, schedule):
    compare(*both(kind, 3, parallel={"schedule": schedule}), exact=False)


@pytest.mark.costly
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [2, 6])
def test_they_may_where_data_ranks_share_a_stage(stage, num_stages):
    compare(*both(Depths, num_stages, 2 if num_stages == 2 else 1, stage), exact=False)


def test_they_may_in_a_loop_of_the_programs_own():
    compare(*both(Depths, 3, by_hand=True), exact=False)


class TrainsMore(nn.Module):
    """Calls what its wide layers are in training alone, and a projection after the head."""

    def __init__(self):
        super().__init__()
        self.embed, self.narrow = nn.Embedding(families.VOCABULARY, 12), nn.Linear(12, 12)
        self.wide, self.back = nn.Linear(12, 40), nn.Linear(40, 12)
        self.head = nn.Linear(12, families.VOCABULARY)
        self.projection = nn.Linear(families.VOCABULARY, families.VOCABULARY)

    def forward(self, tokens, labels):
        x = self.narrow(self.embed(tokens))
        x = self.back(self.wide(x).tanh()) if self.training else x
        x = self.head(x)
        x = self.projection(x) if self.training else x
        return F.cross_entropy(x.flatten(0, 1), labels.flatten())


def evaluate(world, num_stages):
    settings = families.config(1, GAS, num_stages)
    if num_stages:
        settings["parallel"]["pipeline"] = {"stages": num_stages, "cut": "by_operator"}
    engine = deeptide.initialize(model=made(TrainsMore, operators.TOKENS)(None), config=settings, world=world)[0]
    given = list(families.batches("plain", 0, 1, 1, GAS))
    return [each(iter(given)).item() for each in (engine.train_batch, engine.eval_batch, engine.train_batch)]


@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
def test_an_evaluation_may_leave_out_a_part_of_calls(num_stages):
    losses = run_ranks(1, evaluate, 0)[0]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    for found in run_ranks(num_stages, evaluate, num_stages):
        assert found == pytest.approx(losses, rel=1e-5)
