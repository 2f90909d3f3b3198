# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters that get other rows after initialize, as resize_token_embeddings does: rebuilt, or named."""

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide


class Words(nn.Module):
    """An embedding and a head, tied or not, as Transformers resizes them."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.layer(self.embed(tokens))))

    def resize(self, rows):
        """Keeps the Parameters and sets their data."""
        for weight in {id(p): p for p in (self.embed.weight, self.head.weight)}.values():
            old = weight.detach()
            new = torch.full((rows, 6), 0.25)
            kept = min(rows, old.shape[0])
            new[:kept] = old[:kept]
            weight.data = new


class TiedWords(Words):
    def __init__(self):
        super().__init__(tied=True)


def word_loss(model, step, rank, of=8):
    tokens = torch.randint(0, of, (4,), generator=torch.Generator().manual_seed(100 * rank + step))
    return nn.functional.cross_entropy(model(tokens).float(), (tokens + 1) % of)


SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}


def plain_resized(kind, rows, ranks=2):
    """Plain torch, whose Adam has the moments of old rows and zeros for new ones."""
    model = models.make_model(kind=kind)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)

    def steps(first, last):
        for step in range(first, last):
            for rank in range(ranks):
                (word_loss(model, step, rank) / ranks).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(0, 2)
    model.resize(rows)
    for weight in {id(p): p for p in (model.embed.weight, model.head.weight)}.values():
        state = optimizer.state[weight]
        for name in ("exp_avg", "exp_avg_sq"):
            moment = torch.zeros(rows, 6)
            kept = min(rows, 10)
            moment[:kept] = state[name][:kept]
            state[name] = moment
    steps(2, 5)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("rows", [13, 9])
@pytest.mark.parametrize("kind", [Words, TiedWords])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_rows_that_stay_are_trained_as_before_after_a_rebuild(stage, kind, rows):
    def program(world):
        config = models.config(stage, gradient_clipping=0.0)
        engine = deeptide.initialize(model=models.make_model(kind=kind), config=config, world=world)[0]
        for step in range(5):
            if step == 2:
                with torch.no_grad():
                    engine.module.resize(rows)
                engine.rebuild()
            engine.backward(word_loss(engine, step, world.rank))
            engine.step()
        return {name: engine._core.full_state(name, "master") for name, _ in engine.module.named_parameters()}

    expected = plain_resized(kind, rows)
    for found in run_ranks(2, program):
        assert set(found) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=2e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("stage", [0, 2])
def test_rows_that_stay_keep_their_masters_in_bf16(stage):
    config = models.config(stage, bf16=True, gradient_clipping=0.0)
    engine = deeptide.initialize(model=models.make_model(kind=Words), config=config)[0]
    for step in range(2):
        engine.backward(word_loss(engine, step, 0))
        engine.step()
    before = engine._core.full_state("embed.weight", "master")
    assert not torch.equal(before, before.bfloat16().float())
    with torch.no_grad():
        new = torch.cat([engine.module.embed.weight.detach(), torch.ones(2, 6, dtype=torch.bfloat16)])
        new[3] = 2.0  # which the program writes
        engine.module.embed.weight.data = new
    engine.rebuild()
    after = engine._core.full_state("embed.weight", "master")
    expected = torch.cat([before, torch.ones(2, 6)])
    expected[3] = 2.0
    assert torch.equal(after, expected)


def test_a_resized_parameter_is_named_before_the_first_forward():
    engine = deeptide.initialize(model=models.make_model(kind=Words), config=models.config(0))[0]
    engine.module.resize(12)
    text = r"parameter 'embed.weight' has the shape \[12, 6\] now, and had \[10, 6\] .*engine.rebuild\(\)"
    with pytest.raises(ValueError, match=text):
        engine(torch.zeros(4, dtype=torch.long))
    loss = word_loss(engine.module, 0, 0)
    with pytest.raises(ValueError, match=text):
        engine.backward(loss)
    engine.rebuild()
    engine.backward(word_loss(engine, 0, 0))
    assert engine.step().applied


def test_other_changes_of_shape_are_refused_by_a_rebuild():
    engine = deeptide.initialize(model=models.make_model(kind=Words), config=models.config(0))[0]
    engine.module.layer.weight.data = torch.zeros(6, 7)
    with pytest.raises(ValueError, match=r"'layer.weight' has the shape \[6, 7\].*number of rows"):
        engine.rebuild()
