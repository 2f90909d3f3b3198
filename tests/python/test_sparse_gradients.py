# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Embeddings with sparse=True: their gradients count as dense ones, at every stage, accumulated, in fp32 and bf16."""

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
    config = models.config(stage, gas=gas, bf16=bf16, sparse_gradients=sparse)
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
