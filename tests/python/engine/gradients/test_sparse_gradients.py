# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Embeddings with sparse=True: their gradients count as dense ones, at every stage, and travel without their zeros."""

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn
from torch.nn import functional as F

import deeptide

pytestmark = pytest.mark.both_ways
STAGES = [0, 1, 2, 3]


class Net(nn.Module):
    """Looks words up twice, so that sparse rows repeat; `tied` also reads the embedding as a dense matrix."""

    def __init__(self, sparse, tied=False):
        super().__init__()
        self.words = nn.Embedding(37, 8, sparse=sparse)
        self.head = nn.Linear(8, 37, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens, targets):
        x = torch.tanh(self.words(tokens)) + self.words(tokens.flip(-1))
        return F.cross_entropy(self.head(x).flatten(0, -2).float(), targets.flatten())


def train(world, stage, sparse, gas, bf16, tied):
    model = models.make_model(kind=Net, sparse=sparse, tied=tied)
    config = models.config(stage, gas=gas, bf16=bf16)
    engine, *_ = deeptide.initialize(model=model, config=config, world=world)
    norms = []
    for tokens, targets in models.batches(3 * gas, 2 * world.size):
        mine = slice(2 * world.rank, 2 * world.rank + 2)
        engine.backward(engine(tokens[mine], targets[mine]))
        norms.append(engine.step().grad_norm)
    state = engine.module_state_dict()
    engine.destroy()
    return state, norms[gas - 1 :: gas]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_sparse_gradients_count_as_dense_ones(world, stage, tied):
    for gas, bf16 in ((1, False), (2, True)):
        sparse = run_ranks(world, train, stage, True, gas, bf16, tied)
        dense = run_ranks(world, train, stage, False, gas, bf16, tied)
        for (state, norms), (expected, expected_norms) in zip(sparse, dense, strict=True):
            # Repeated rows are added up in another order: sums of a few fp32 terms, or one rounding to bf16 each.
            tolerance = {"rtol": 2e-2, "atol": 2e-2} if bf16 else {"rtol": 2e-5, "atol": 2e-5}
            torch.testing.assert_close(norms, expected_norms, **tolerance)
            for name, value in state.items():
                torch.testing.assert_close(value, expected[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}")


# -- as rows that are not zero ----------------------------------------------------------------------------------------


class Lookup(nn.Module):
    """A large table of which a batch reads few rows; each stage has it in a unit with or without other parameters."""

    def __init__(self, sparse=True, words=5000, width=32):
        super().__init__()
        self.table = nn.Embedding(words, width, sparse=sparse)
        self.head = nn.Linear(width, 1)

    def forward(self, tokens):
        return self.head(torch.tanh(self.table(tokens))).float().square().mean()


def look_up(world, stage, by_rows, gas=1, bf16=False, sparse=True, count=6, tokens_of=None):
    """Weights, norms, and the bytes that each step's gradients sent."""
    model = models.make_model(kind=Lookup, sparse=sparse)
    config = models.config(stage, gas=gas, bf16=bf16, sparse_gradients=by_rows)
    engine, *_ = deeptide.initialize(model=model, config=config, world=world)
    draw = torch.Generator().manual_seed(7 + world.rank)
    norms, sent = [], []
    for _ in range(3 * gas):
        tokens = torch.randint(0, 5000, (count,), generator=draw) if tokens_of is None else tokens_of(world, engine)
        if tokens is not None:
            engine.backward(engine(tokens))
        outcome = engine.step()
        if outcome.applied:
            norms.append(outcome.grad_norm)
            sent.append(outcome.sent_bytes)
    state = engine.module_state_dict()
    engine.destroy()
    return state, norms, sent


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_that_are_not_zero_give_the_bits_of_the_whole_table(world, stage):
    for gas, bf16, sparse in ((1, False, True), (2, True, True), (2, False, False)):
        rows = run_ranks(world, look_up, stage, True, gas, bf16, sparse)
        whole = run_ranks(world, look_up, stage, False, gas, bf16, sparse)
        for (state, norms, _), (expected, expected_norms, _) in zip(rows, whole, strict=True):
            assert norms == expected_norms
            for name, value in state.items():
                assert torch.equal(value, expected[name]), name


@pytest.mark.apart
@pytest.mark.parametrize("stage", STAGES)
def test_rows_that_are_not_zero_take_a_fraction_of_the_bytes(stage):
    rows = run_ranks(2, look_up, stage, True)
    whole = run_ranks(2, look_up, stage, False)
    table = 4 * 5000 * 32
    for (_, _, few), (_, _, many) in zip(rows, whole, strict=True):
        # Stages 1 and 2 publish the parameters, all of which AdamW moves. Stage 3 gathers them at the end of each step,
        # ahead of the next forward, and for the first forward too.
        published = [table // 2 if stage > 0 else 0] * len(many)
        published[0] *= 2 if stage == 3 else 1
        gathered = table // 2 if stage == 0 else 0
        for one, other, parameters in zip(few, many, published, strict=True):
            assert other >= table // 2 + gathered + parameters
            assert 0 <= one - parameters < (table // 2 + gathered) // 10


@pytest.mark.apart
def test_a_table_read_whole_takes_no_more_bytes_than_before():
    def all_words(_, __):
        return torch.arange(5000)

    rows = run_ranks(2, look_up, 2, True, 1, False, True, 0, all_words)
    whole = run_ranks(2, look_up, 2, False, 1, False, True, 0, all_words)
    for (_, norms, some), (_, expected, many) in zip(rows, whole, strict=True):
        assert norms == expected
        assert all(one <= other + 64 for one, other in zip(some, many, strict=True))  # each step's count of blocks


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_a_batch_sends_no_rows(stage):
    def of_first_rank(world, _):
        return torch.tensor([3, 5]) if world.rank == 0 else None

    rows = run_ranks(2, look_up, stage, True, 1, False, True, 0, of_first_rank)
    whole = run_ranks(2, look_up, stage, False, 1, False, True, 0, of_first_rank)
    for one, other in zip(rows, whole, strict=True):
        assert one[1] == other[1]
        assert all(torch.equal(value, other[0][name]) for name, value in one[0].items())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_rank_may_run_ahead(stage):
    """Two backward calls of one rank before the step: their rows are added up before they travel."""

    def run(world, by_rows):
        model = models.make_model(kind=Lookup)
        engine, *_ = deeptide.initialize(
            model=model, config=models.config(stage, sparse_gradients=by_rows), world=world
        )
        for step in range(2):
            for part in range(1 + world.rank):
                engine.backward(engine(torch.tensor([step, part, 4000])))
            engine.step()
        return engine.module_state_dict()

    for one, other in zip(run_ranks(2, run, True), run_ranks(2, run, False), strict=True):
        for name, value in one.items():
            # If both travel by themselves, the ranks' rows are added between them: another order.
            torch.testing.assert_close(value, other[name], rtol=2e-5, atol=2e-5)
