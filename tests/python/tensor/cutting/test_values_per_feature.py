# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters and buffers with a value for each hidden feature, between a column and a row layer."""

import cut
import models
import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide
from deeptide.tensor.cutting.between import per_feature
from deeptide.tensor.cutting.plans import COLUMN, ROW, Cut

WIDTH, HIDDEN = 8, 16


class OverFeatures(nn.Module):
    """A module of torch that wants rows of features."""

    def __init__(self, kind):
        super().__init__()
        self.within = kind(HIDDEN)

    def forward(self, x):
        return self.within(x.flatten(0, -2)).view(x.shape)


class Scale(nn.Module):
    def __init__(self, is_trained, shape=(HIDDEN,)):
        super().__init__()
        values = torch.linspace(0.5, 2.0, HIDDEN).view(shape)
        if is_trained:
            self.scale = nn.Parameter(values)
        else:
            self.register_buffer("scale", values)

    def forward(self, x):
        return torch.tanh(x * self.scale)


KINDS = {
    "prelu": lambda: OverFeatures(nn.PReLU),
    "batch norm": lambda: OverFeatures(nn.BatchNorm1d),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(HIDDEN), nn.Tanh()),
    "scale": lambda: Scale(True),
    "gate of three dimensions": lambda: Scale(True, (1, 1, HIDDEN)),
    "buffer": lambda: Scale(False),
}


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm, self.fc1 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.act, self.fc2 = KINDS[kind](), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def train(world, kind, parallel):
    """Updates of SGD, and the shape of a column's weight."""
    model = models.make_model(kind=lambda: Blocks(kind))
    before = {name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()}
    settings = {**models.config(0, micro=4), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = deeptide.initialize(model=model, config={**settings, "parallel": parallel}, world=world)[0]
    shape = tuple(model.blocks[0].fc1.weight.shape)
    for number in range(2):
        x = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(x).square().mean())
        engine.step()
    after = engine.module_state_dict()
    return {name: cut.moved(name, before, after) for name in before}, shape


@pytest.mark.parametrize("kind", KINDS)
def test_values_for_each_feature_train_as_in_the_whole_model(kind):
    whole, _ = run_ranks(1, train, kind, {})[0]
    for updates, shape in run_ranks(2, train, kind, {"tensor": 2}):
        assert shape == (HIDDEN // 2, WIDTH)
        for name, update in whole.items():
            cut.near(updates[name], update, 1e-4, name, floor=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_values_for_each_feature_are_refused_by_name_where_nothing_is_compared(kind):
    with pytest.raises(deeptide.ConfigError, match=r"'blocks\.0\.act\..*' has a value for each of the 16 features of"):
        run_ranks(2, train, kind, {"tensor": 2, "tensor_check": False})


def test_norms_before_the_layers_have_no_value_for_features_in_between():
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.after = nn.LayerNorm(8)

    plan = {"0.up": Cut(COLUMN), "0.down": Cut(ROW)}
    assert not [*per_feature(nn.ModuleList([Square()]), plan)]
    assert not [*per_feature(nn.ModuleList([Square()]), {**plan, "0.up": Cut(COLUMN, True), "0.down": Cut(ROW, True)})]
