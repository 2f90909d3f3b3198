# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models of whose positions ranks cannot have parts are refused by name, and those that would compute other numbers."""

import cut
import models
import pytest
import torch
from conftest import run_ranks
from test_sequence_parallel_models import make, parallel
from torch import nn

import deeptide
from deeptide.efficiency import RandomLayerTokenDrop
from deeptide.tensor import make_team, split_model


def refuse(world, build, match, settings):
    with pytest.raises(deeptide.ConfigError, match=match):
        deeptide.initialize(model=build(), config={**models.config(0), **parallel(2), **settings}, world=world)


class Experts(nn.Module):
    """A block of a mixture that calls its experts by itself."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 4), make("mixtral").model.layers[0].mlp.experts


def mixture_without_a_module():
    model = make("mixtral")
    model.model.layers = nn.ModuleList(Experts() for _ in range(2))
    model._tp_plan = {
        "model.layers.*.experts": "moe_tp_experts",
        **{
            f"model.layers.*.experts.{name}": style
            for name, style in {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}.items()
        },
    }
    return model


def with_layerdrop():
    model = make("llama")
    model.config.layerdrop = 0.1
    return model


def with_random_ltd():
    model = make("llama")
    RandomLayerTokenDrop(model.model.layers[1])
    return model


class Flat(models.TinyModel):
    """Its blocks take (tokens, features)."""

    def forward(self, tokens, targets=None):
        x = self.embed(tokens).flatten(0, 1)
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x))


REFUSALS = {
    "layerdrop": (with_layerdrop, "layerdrop is 0.1"),
    "random-LTD": (with_random_ltd, "does not go with random-LTD"),
    "experts": (mixture_without_a_module, "'model.layers.0' calls its experts 'model.layers.0.experts' by itself"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_have_parts_is_refused_by_name(case):
    build, match = REFUSALS[case]
    run_ranks(2, refuse, build, match, {})


def refuse_later(world):
    drops = {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.1}}
    model = make("llama")
    with pytest.raises(deeptide.ConfigError, match="progressive layer drop does not go with"):
        deeptide.initialize(model=model, config={**models.config(0), **parallel(2), **drops}, world=world)
    with pytest.raises(deeptide.ConfigError, match="random-LTD does not go with"):
        RandomLayerTokenDrop(model.model.layers[0])


def test_layers_that_are_left_out_later_are_refused_by_name():
    run_ranks(2, refuse_later)


def test_a_model_without_blocks_is_refused():
    def rank(world):
        model = nn.ModuleDict({"up": nn.Linear(8, 8), "down": nn.Linear(8, 8)})
        specs = [
            {"patterns": [r"up\.weight"], "partition_type": "column"},
            {"patterns": [r"down\.weight"], "partition_type": "row"},
        ]
        with pytest.raises(deeptide.ConfigError, match="no ModuleList or Sequential of blocks"):
            split_model(model, make_team(2, world, 60.0), specs, False, sequence_parallel_norms=True)

    run_ranks(2, rank)


def test_activations_of_another_form_are_refused():
    def rank(world):
        model, example = models.make_model(kind=Flat), {"tokens": torch.arange(8).view(2, 4)}
        with pytest.raises(deeptide.ConfigError, match=r"given \(8, 20\) first, expected a tensor"):
            split_model(model, make_team(2, world, 60.0), cut.SPECS, False, True, example, sequence_parallel_norms=True)

    run_ranks(2, rank)


def test_a_model_that_was_cut_without_parts_is_refused():
    def rank(world):
        model = split_model(make("llama"), make_team(2, world, 60.0))
        refuse(world, lambda: model, "layers were cut without it", {})

    run_ranks(2, rank)


class Averages(models.Block):
    """Its output at each position is of all positions."""

    def forward(self, x):
        return super().forward(x) + x.mean(1, keepdim=True)


def test_blocks_that_mix_positions_by_themselves_are_found_at_the_start():
    def rank(world):
        model = models.make_model()
        model.h = nn.ModuleList(Averages(20) for _ in range(2))
        example = {"tokens": torch.arange(8).view(2, 4)}
        with pytest.raises(deeptide.ConfigError, match="differs by up to"):
            split_model(model, make_team(2, world, 60.0), cut.SPECS, False, True, example, sequence_parallel_norms=True)

    run_ranks(2, rank)
