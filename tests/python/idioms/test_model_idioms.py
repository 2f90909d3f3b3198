# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Torch's idioms for models beside an engine: saved and copied whole, or an error that names the cure."""

import copy
import io
import pickle

import cut
import edges
import models
import pytest
import torch
from conftest import run_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import deeptide
from deeptide import ConfigError
from deeptide.pipeline import LayerSpec, PipelineModule
from deeptide.pipeline.errors import PipelineError

STAGES = [0, 1, 2, 3]


class Blocks(nn.Module):
    """A chain that is cut into two stages."""

    def __init__(self):
        super().__init__()
        self.begin = nn.Linear(6, 6)
        self.layers = nn.ModuleList([models.Block(6) for _ in range(4)])
        self.end = nn.Linear(6, 6)

    def forward(self, x):
        x = self.begin(x)
        for layer in self.layers:
            x = layer(x)
        return self.end(x).square().mean()


def start_on_stages(world, stage=1):
    config = models.config(stage, gas=2, parallel={"pipeline": {"stages": 2}})
    return deeptide.initialize(model=models.make_model(kind=Blocks), config=config, world=world)[0]


def saved(model):
    """Goes through a file of torch.save with the model's state_dict()."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def assert_whole(state, engine):
    expected = engine.module_state_dict()
    assert set(state) == set(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


# -- saved -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_saved_state_dict_is_whole(stage):
    def program(world):
        engine = edges.start(world, stage)
        edges.train(engine, 2, rank=world.rank)
        assert_whole(saved(engine.module), engine)

    run_ranks(2, program)


def test_a_part_of_a_model_on_stages_is_not_saved():
    def program(world):
        engine = start_on_stages(world)
        own = [name for name, _ in engine.module.named_parameters()]
        assert 0 < len(own) < len(list(models.make_model(kind=Blocks).parameters()))
        with pytest.raises(ConfigError, match=r"other stages .*engine.whole_state_dict\(\).*engine.snapshot\(\)"):
            engine.module.state_dict()
        with pytest.raises(ConfigError, match="other stages"):
            nn.ModuleDict({"student": engine.module}).state_dict()
        mine = engine.module.layers[0 if world.rank == 0 else 3]
        assert set(mine.state_dict()) == {name for name, _ in mine.named_parameters()}
        state = saved(engine.snapshot())
        whole = engine.whole_state_dict()
        assert set(state) == set(models.make_model(kind=Blocks).state_dict())
        assert world.rank > 0 or all(torch.equal(value, whole[name]) for name, value in state.items())

    run_ranks(2, program)


def test_a_part_of_a_model_whose_layers_ranks_share_is_not_saved():
    def program(world):
        engine = cut.start(world, cut.config(1, 2))
        with pytest.raises(ConfigError, match=r"2 ranks share .*engine.whole_state_dict\(\)"):
            engine.module.state_dict()
        assert len(engine.module.h[0].norm.state_dict()) == 2  # which each rank has whole
        assert sum(value.numel() for value in engine.whole_state_dict().values()) > 0 or world.rank > 0
        twin = AveragedModel(engine.module)
        with pytest.raises(ConfigError, match="2 ranks share"):
            twin.state_dict()

    run_ranks(2, program)


def test_the_state_dict_of_a_pipeline_module_says_that_it_is_a_stages():
    def program(world):
        layers = [LayerSpec(nn.Linear, 6, 6) for _ in range(4)]
        module = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), world=world)
        engine = deeptide.initialize(model=module, config=models.config(1, gas=2), world=world)[0]
        return len(engine.module.state_dict())

    with pytest.warns(deeptide.DeeptideWarning, match="this stage's layers alone"):
        assert run_ranks(2, program) == [4, 4]


# -- copied ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_is_whole_and_its_own(stage):
    def program(world):
        engine = edges.start(world, stage)
        edges.train(engine, 1, rank=world.rank)
        twin = copy.deepcopy(engine.module)
        assert_whole(twin.state_dict(), engine)
        before = twin.first.weight.detach().clone()
        edges.train(engine, 1, first=1, rank=world.rank)
        assert torch.equal(twin.first.weight, before)
        twin.first.weight.sum().backward()
        assert torch.equal(twin.first.weight.grad, torch.ones(6, 6))  # no engine's
        twin.zero_grad()
        assert twin.first.weight.grad is None

    run_ranks(2, program)


@pytest.mark.parametrize("stage", STAGES)
def test_an_averaged_model_averages_the_engines(stage):
    def program(world):
        engine = edges.start(world, stage)
        averaged = AveragedModel(engine.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        seen = []
        for step in range(3):
            edges.train(engine, 1, first=step, rank=world.rank)
            averaged.update_parameters(engine.module)
            seen.append(engine._core.full_state("first.weight", "master"))
        expected = seen[0].lerp(seen[1], 0.5).lerp(seen[2], 0.5)
        torch.testing.assert_close(averaged.module.first.weight.detach(), expected)

    run_ranks(2, program)


def test_a_stage_of_a_pipeline_is_not_copied():
    def program(world):
        engine = start_on_stages(world)
        for make_copy in (copy.deepcopy, AveragedModel, pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
            with pytest.raises(PipelineError, match=r"engine.snapshot\(\)"):
                make_copy(engine.module)
        whole = AveragedModel(engine.snapshot())
        assert len(list(whole.module.parameters())) == len(list(models.make_model(kind=Blocks).parameters()))

    run_ranks(2, program)


@pytest.mark.parametrize("stage", STAGES)
def test_a_saved_model_is_whole(stage):
    def program(world):
        engine = edges.start(world, stage)
        edges.train(engine, 1)
        file = io.BytesIO()
        torch.save(engine.module, file)
        file.seek(0)
        assert_whole(torch.load(file, weights_only=False).state_dict(), engine)

    run_ranks(2, program)


def test_share_memory_after_initialize_is_an_error():
    engine = edges.start(None, 0)
    engine.module.share_memory()
    with pytest.raises(ValueError, match="share_memory"):
        edges.train(engine, 1)
