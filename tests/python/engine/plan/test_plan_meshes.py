# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The plan of a mesh: what its engines forecast for themselves, before there is one."""

import sys
from pathlib import Path

import pytest
import torch
from conftest import run_ranks

import deeptide

sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("pipeline", "tensor")]
import cut
import families
import models

ROLES = ("parameters", "gradients", "optimizer states")


def sizes(lines, attribute):
    return {role: getattr(lines[role], attribute) for role in ROLES}


def of_a_stage(world, name, settings, stages):
    """(what is planned for this rank's stage, what its engine forecasts)."""
    model = families.make(name)
    planned = deeptide.plan(model, settings, world.size)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    stage = world.rank // (world.size // stages)
    lines = {line.role: line for line in engine.memory()}
    engine.destroy()
    return sizes(planned.stages[stage].lines, "memory_bytes"), sizes(lines, "predicted_bytes")


@pytest.mark.parametrize("name", ["gpt2", "llama", "plain", "t5"])
@pytest.mark.parametrize(("stages", "world"), [(2, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize(("zero", "bf16"), [(0, False), (1, True), (2, False), (3, True)])
def test_a_stage_takes_what_was_planned(name, stages, world, zero, bf16):
    settings = families.config(zero, 2, stages, bf16=bf16)
    for planned, forecast in run_ranks(world, of_a_stage, name, settings, stages):
        assert planned == forecast


def of_a_team(world, settings):
    model = models.make_model()
    planned = deeptide.plan(model, settings, world.size)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    lines = {line.role: line for line in engine.memory()}
    engine.destroy()
    return sizes(planned.lines, "memory_bytes"), sizes(lines, "predicted_bytes")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("tensor", "world"), [(2, 2), (2, 4), (4, 4)])
def test_a_tensor_team_takes_what_was_planned(zero, tensor, world):
    for planned, forecast in run_ranks(world, of_a_team, cut.config(zero, tensor)):
        assert planned == forecast


def test_a_host_has_the_ranks_of_its_stages():
    settings = families.config(1, 2, 2)
    model = families.make("gpt2")
    plan = deeptide.plan(model, settings, world_size=8, ranks_per_host=4)  # a stage on each host
    assert [stage.core.world_size for stage in plan.stages] == [4, 4]
    assert plan.host_bytes == 4 * max(stage.peak_bytes for stage in plan.stages)
    both = deeptide.plan(model, settings, world_size=8, ranks_per_host=8)
    assert both.host_bytes == 4 * sum(stage.peak_bytes for stage in both.stages)
    assert sum(stage.core.num_parameters for stage in plan.stages) == sum(p.numel() for p in model.parameters())


def test_a_weight_that_two_stages_use_is_one_stages_and_lent_to_the_other():
    model = families.make("gpt2")  # the head's weight is the embedding's
    plan = deeptide.plan(model, families.config(1, 2, 2), world_size=2)
    assert plan.lent == [0, model.transformer.wte.weight.numel()]
    assert "stage 1 also holds 368 elements that other stages lend it" in str(plan)


def test_a_stage_may_be_frozen():
    model = families.make("llama")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)
    plan = deeptide.plan(model, families.config(1, 2, 2), world_size=4)
    assert [stage.core.num_trained > 0 for stage in plan.stages] == [False, True]
    assert sum(stage.core.num_parameters for stage in plan.stages) == sum(p.numel() for p in model.parameters())


def of_functions_alone(world, settings):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Tanh())
    planned = deeptide.plan(model, settings, world.size)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    lines = {line.role: line for line in engine.memory()}
    engine.destroy()
    stage = planned.stages[world.rank]
    return stage.core.num_parameters, sizes(stage.lines, "memory_bytes"), sizes(lines, "predicted_bytes")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_stage_may_own_nothing(zero):
    settings = families.config(zero, 2, 2)
    settings["parallel"] = {"pipeline": {"stages": 2, "cut": ["2"]}}
    counts = []
    for count, planned, forecast in run_ranks(2, of_functions_alone, settings):
        assert planned == forecast
        counts.append(count)
    assert counts == [2 * (8 * 8 + 8), 0]


def test_planning_changes_nothing_in_the_model():
    model = families.make("gpt2")
    before = {name: (id(p), p.shape) for name, p in model.named_parameters()}
    settings = families.config(1, 2, 2)
    settings["parallel"] = {"pipeline": 2, "tensor": 2}
    plan = deeptide.plan(model, settings, world_size=4)
    assert "pipeline 2 x data 1 x tensor 2" in str(plan)
    assert {name: (id(p), p.shape) for name, p in model.named_parameters()} == before
    assert plan.core.num_parameters < sum(p.numel() for p in model.parameters()) / 2


def test_a_mesh_of_a_model_that_takes_no_memory():
    with deeptide.zero.Init():
        model = torch.nn.Sequential(*[torch.nn.Linear(1 << 11, 1 << 11) for _ in range(8)])
    settings = families.config(2, 2, 4)
    plan = deeptide.plan(model, settings, world_size=16)
    assert [stage.core.num_parameters for stage in plan.stages] == [2 * ((1 << 22) + (1 << 11))] * 4
    assert deeptide._C.is_deferred(model[0].weight)


@pytest.mark.parametrize(
    ("parallel", "text"),
    [({"pipeline": 3}, "4 ranks"), ({"tensor": 3}, "4 ranks"), ({"tensor": 4}, "do not divide|does not divide")],
    ids=str,
)
def test_meshes_that_cannot_be_are_refused_as_at_the_start(parallel, text):
    settings = families.config(1, 2)
    settings["parallel"] = parallel
    with pytest.raises(deeptide.ConfigError, match=text):
        deeptide.plan(families.make("llama"), settings, world_size=4)
