# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Sequence-parallel norms: each rank has a part of the positions between the layers that ranks share."""

import cut
import models
import pytest
import torch
from conftest import run_ranks
from torch import nn
from torch.nn import functional as F

import deeptide
from deeptide.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    cut_sequence,
    joined_sequence,
    make_team,
    sequence_parallel,
)


class Block(nn.Module):
    def __init__(self, width, team):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        if team is None:
            self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        else:
            self.up = ColumnParallelLinear(width, 3 * width, team=team, sequence_parallel=True)
            self.down = RowParallelLinear(3 * width, width, team=team, sequence_parallel=True)
            sequence_parallel(self.norm, team)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Without a team: whole."""

    def __init__(self, team=None, width=20, vocab=37):
        super().__init__()
        self.team = team
        self.embed = nn.Embedding(vocab, width)
        self.h = nn.ModuleList(Block(width, team) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)
        if team is not None:
            sequence_parallel(self.norm, team)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        if self.team is not None:
            x = cut_sequence(x, self.team)
        for block in self.h:
            x = block(x)
        x = self.norm(x)
        if self.team is not None:
            x = joined_sequence(x, self.team)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def train(world, settings, size, is_cut):
    team = make_team(size, world, 60.0) if is_cut else None
    model = models.make_model(kind=lambda: Model(team))
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    rank, ranks = cut.batch_rank(engine)
    losses, norms, gradients = [], [], {}
    for tokens, targets in models.batches(3, cut.MICRO * ranks):
        mine = slice(rank * cut.MICRO, (rank + 1) * cut.MICRO)
        loss = engine(tokens[mine], targets[mine])
        losses.append(loss.item())
        engine.backward(loss)
        gradients = gradients or (cut.whole(engine, "gradient") if is_cut else states(engine))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return losses, norms, gradients


def states(engine):
    return {name: engine._core.full_state(name, "gradient") for name, _ in engine.module.named_parameters()}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("mesh", [(2, 1), (3, 1), (2, 2)], ids=str)
def test_norms_of_a_part_of_the_positions_train_as_the_whole_model(mesh, stage):
    size, data = mesh
    settings = models.config(stage, micro=cut.MICRO)
    shared = run_ranks(size * data, train, settings, size, True)
    whole = run_ranks(data, train, settings, 1, False)
    largest = max(gradient.abs().max().item() for gradient in whole[0][2].values())
    for rank, (losses, norms, gradients) in enumerate(shared):
        cut.near(losses, whole[rank // size][0], 1e-5, "losses")
        cut.near(norms, whole[0][1], 1e-4, "norms")
        for name, gradient in whole[0][2].items():
            cut.near(gradients[name], gradient, 1e-4, name, floor=largest / 1000)


def test_positions_that_do_not_divide_are_refused():
    def rank(world):
        team = make_team(2, world, 60.0)
        with pytest.raises(ValueError, match="5 positions do not divide among 2 ranks"):
            cut_sequence(torch.zeros(1, 5, 3), team)
        layer = ColumnParallelLinear(4, 4, team=team, sequence_parallel=True)
        assert layer(torch.zeros(1, 3, 4)).shape == (1, 6, 2)

    run_ranks(2, rank)


def rows(world):
    team = make_team(world.size, world, 60.0)
    own = torch.arange(world.size * 5.0).view(world.size, 5) * (1 + world.rank)
    with pytest.raises(ValueError, match=r"expected . rows, one for each rank"):
        team.core.reduce_scatter(torch.zeros(world.size + 1, 2), "forward")
    return own, team.core.reduce_scatter(own, "forward")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_rank_has_its_row_of_the_sum(ranks):
    results = run_ranks(ranks, rows)
    total = sum(own for own, _ in results)
    for rank, (_, row) in enumerate(results):
        assert torch.equal(row, total[rank])
