# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models whose forward replaces modules, as BigBird's does for inputs as short as those of the check at the start."""

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide
from deeptide._model.changes import Structure
from deeptide.tensor import make_team, split_model


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(x)))


class Other(Mixer):
    pass


class Short(nn.Module):
    """It has another block from the first short input on."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.kind = nn.Linear(8, 8), nn.ModuleList([Mixer(), Mixer()]), "long"

    def forward(self, x):
        if x.shape[1] < 16 and self.kind == "long":
            self.blocks[1], self.kind = Other(), "short"
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def start(world, parallel, length):
    model = models.make_model(kind=Short)
    if length:
        x = torch.linspace(-1, 1, 2 * length * 8).view(2, length, 8)
        split_model(model, make_team(2, world=world), example={"x": x})
    try:
        deeptide.initialize(model=model, config={**models.config(0), "parallel": parallel}, world=world)
    finally:
        kinds = type(model.blocks[1]).__mro__[0], model.kind
        assert kinds == (Mixer, "long") or length, kinds
    return model.kind


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2, "tensor": 2}])
def test_a_check_that_replaces_modules_refuses_the_model_and_leaves_it_as_it_was(parallel):
    ranks = 4 if "pipeline" in parallel else 2
    with pytest.raises(deeptide.ConfigError, match=r"another module in the place of 'blocks\.1'"):
        run_ranks(ranks, start, parallel, 0)


def test_an_example_as_long_as_the_programs_inputs_is_right():
    assert run_ranks(2, start, {"tensor": 2}, 16) == ["long", "long"]


def test_structure_comes_back_with_the_values_that_go_with_it():
    model = Short()
    before, structure = model.blocks[1], Structure(model)
    assert structure.restore() == ""
    model(torch.randn(1, 4, 8))
    assert structure.restore() == "blocks.1"
    assert model.blocks[1] is before and model.kind == "long"
