# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A plain GPT, whose layers have names of its own, is cut by what flows between them, without an example."""

import cut
import models
import pytest
import torch
from conftest import run_ranks
from torch import nn
from torch.nn import functional as F

import deeptide
from deeptide.tensor import make_team, split_model
from deeptide.tensor.cutting.flow import Pair, fits, pairs_of
from deeptide.tensor.cutting.plans import COLUMN, ROW, Cut

WORDS, WIDTH, HEADS = 61, 32, 4


class Attention(nn.Module):
    """knows_heads: the features of a head are those that it was built with, however many heads there are."""

    def __init__(self, knows_heads):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.knows_heads = HEADS, WIDTH, knows_heads

    def forward(self, x):
        rows, length, width = x.size()
        parts = self.qkv(x).chunk(3, -1) if self.knows_heads else self.qkv(x).split(self.n_embd, -1)
        of_head = WIDTH // HEADS if self.knows_heads else width // self.n_head
        q, k, v = (part.view(rows, length, self.n_head, of_head).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self, knows_heads):
        super().__init__()
        self.before, self.attn = nn.LayerNorm(WIDTH), Attention(knows_heads)
        self.between, self.fc, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.before(x))
        return x + self.out(F.gelu(self.fc(self.between(x))))


class PlainGpt(nn.Module):
    def __init__(self, knows_heads=False):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(knows_heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens, targets=None):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(world, knows_heads, tensor):
    """(updates of SGD, shapes of the first block's weights)."""
    model = models.make_model(kind=lambda: PlainGpt(knows_heads))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = {**models.config(0, micro=2), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = deeptide.initialize(model=model, config={**settings, "parallel": {"tensor": tensor}}, world=world)[0]
    shapes = {name: tuple(value.shape) for name, value in model.blocks[0].named_parameters()}
    for tokens, targets in models.batches(2, 2, vocab=WORDS, length=6):
        engine.backward(engine(tokens, targets))
        engine.step()
    after = engine.module_state_dict()
    return {name: cut.moved(name, before, after) for name in before}, shapes


class Dropping(nn.Module):
    """A layer between which and the next one dropout draws, and a batch norm that takes one row in evaluation alone."""

    def __init__(self):
        super().__init__()
        self.fc, self.drop, self.out = nn.Linear(WIDTH, 48), nn.Dropout(0.5), nn.Linear(48, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(x + self.out(self.drop(F.gelu(self.fc(x)))))


def test_layers_around_a_dropout_are_cut_as_they_compute_in_evaluation():
    def rank(world):
        model = models.make_model(kind=Dropping)
        split_model(model, make_team(2, world, 60.0), example={"x": torch.ones(1, WIDTH)})
        assert model.training
        assert model.norm.num_batches_tracked == 0
        return tuple(model.fc.weight.shape), tuple(model.out.weight.shape)

    assert run_ranks(2, rank) == [((24, WIDTH), (WIDTH, 24))] * 2


@pytest.mark.parametrize("knows_heads", [False, True])
def test_a_plain_gpt_is_cut_and_trains_as_the_whole_one(knows_heads):
    """Attention that asks its input for a head's features gets its features joined; the other one has heads there."""
    shared = run_ranks(2, train, knows_heads, 2)
    whole = run_ranks(1, train, knows_heads, 1)[0]
    shapes = shared[0][1]
    assert shapes["attn.qkv.weight"] == (48, 32) and shapes["attn.proj.weight"] == (32, 16)
    assert shapes["fc.weight"] == (24, 32) and shapes["out.weight"] == (32, 24)
    for updates, _ in shared:
        for name, update in whole[0].items():
            cut.near(updates[name], update, 1e-4, name, floor=1e-4)


def test_pairs_are_layers_between_which_values_flow_and_nowhere_else():
    pairs = pairs_of(PlainGpt(), {"tokens": torch.arange(12).view(2, 6)})
    names = ("blocks.0", "blocks.1")
    assert pairs == [
        pair
        for name in names
        for pair in (
            Pair((f"{name}.attn.qkv",), f"{name}.attn.proj", f"{name}.attn"),
            Pair((f"{name}.fc",), f"{name}.out", name),
        )
    ]
    plan = {"blocks.0.fc": Cut(COLUMN), "blocks.0.out": Cut(ROW)}
    assert fits(plan, pairs)
    assert not fits({**plan, "blocks.0.attn.proj": Cut(ROW)}, pairs)


class Reads(nn.Module):
    """It returns its first layer's output too, which so cannot be a part of the features."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.one(x)
        return self.two(hidden), hidden


def test_a_model_without_pairs_is_refused_with_the_cure():
    def rank(world):
        with pytest.raises(deeptide.ConfigError, match=r"no layer of Reads is cut by rule.* or name them in"):
            split_model(Reads(), make_team(2, world, 60.0))

    run_ranks(2, rank)
