# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The key parallel.pipeline.cut says where a model as it is is cut."""

import families
import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide import ConfigError
from deeptide.config import load_config
from deeptide.pipeline import PipelineModule

LAYER = "model.layers."


def settings(pipeline, **more):
    return families.config(1, 2) | {"parallel": {"pipeline": pipeline, **more}}


def train(world, given):
    engine = deeptide.initialize(model=families.make("llama"), config=given, world=world)[0]
    batches = families.batches("llama", engine.data_parallel_rank, engine.data_parallel_size, 2, 2)
    losses = [engine.train_batch(batches).item() for _ in range(2)]
    own = {int(name.split(".")[2]) for name, _ in engine.module.named_parameters() if ".layers." in name}
    return losses, own


CUTS = {
    "a number": (2, {}, [{0, 1}, {2, 3}]),
    "stages": ({"stages": 2}, {}, [{0, 1}, {2, 3}]),
    "by_block": ({"stages": 2, "cut": "by_block"}, {}, [{0, 1}, {2, 3}]),
    "a name": ({"stages": 2, "cut": LAYER + "1"}, {}, [{0}, {1, 2, 3}]),
    "one name": ({"stages": 2, "cut": [LAYER + "3"]}, {}, [{0, 1, 2}, {3}]),
    "two names": ({"stages": 3, "cut": [LAYER + "1", LAYER + "2"]}, {}, [{0}, {1}, {2, 3}]),
    "chunks": (
        {"stages": 2, "cut": [LAYER + "1", LAYER + "2", LAYER + "3"]},
        {"schedule": "interleaved"},
        [{0, 2}, {1, 3}],
    ),
}


@pytest.mark.parametrize("name", list(CUTS))
def test_stages_begin_with_the_blocks_that_are_named(name):
    pipeline, more, blocks = CUTS[name]
    found = run_ranks(len(blocks), train, settings(pipeline, **more))
    assert [own for _, own in found] == blocks
    uncut = run_ranks(1, train, families.config(1, 2))
    assert all(losses == uncut[0][0] for losses, _ in found)


def refuse(world, pipeline, text):
    model = families.make("llama")
    with pytest.raises(ConfigError, match=text):
        deeptide.initialize(model=model, config=settings(pipeline), world=world)
    assert type(model.model.layers[0]).__mro__[1].__name__ == "GradientCheckpointingLayer"  # left as it was


REFUSED = [
    ({"stages": 2, "cut": ["lm_head"]}, r"'lm_head' is none of the model's blocks, which are model\.layers\.0, "),
    ({"stages": 2, "cut": [LAYER + "1", LAYER + "2"]}, "got 2 names for 2 parts of the blocks, expected 1"),
    ({"stages": 2, "cut": [LAYER + "0"]}, r"'model\.layers\.0' begins no later than the part before it"),
    ({"stages": 3, "cut": [LAYER + "2", LAYER + "1"]}, r"'model\.layers\.1' begins no later .*'model\.layers\.2'"),
]


@pytest.mark.parametrize(("pipeline", "text"), REFUSED)
def test_a_cut_that_cannot_be_is_refused_on_all_ranks(pipeline, text):
    run_ranks(pipeline["stages"], refuse, pipeline, text)


@pytest.mark.parametrize(
    ("pipeline", "text"),
    [
        (0, "parallel.pipeline: expected an integer of at least 1"),
        ({"stages": 0}, "parallel.pipeline.stages: expected an integer of at least 1"),
        ("two", "parallel.pipeline: expected an object, or an integer of at least 1"),
        ({"stages": 2, "cuts": []}, "parallel.pipeline.cuts: unknown key"),
        ({"stages": 2, "cut": [3]}, r"parallel.pipeline.cut"),
    ],
)
def test_the_key_takes_a_number_or_an_object(pipeline, text):
    with pytest.raises(ConfigError, match=text):
        load_config(settings(pipeline))


def of_layers(world):
    model = PipelineModule([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], 2, world=world)
    with pytest.raises(ConfigError, match=r"parallel\.pipeline\.cut is given, and a PipelineModule"):
        deeptide.initialize(model=model, config=settings({"stages": 2, "cut": ["1"]}), world=world)


def test_a_pipeline_module_has_its_own_bounds():
    run_ranks(2, of_layers)


def test_the_plan_takes_the_same_cut():
    model = families.make("llama")
    sizes = [
        [stage.core.num_parameters for stage in deeptide.plan(model, settings(pipeline), world_size=2).stages]
        for pipeline in ({"stages": 2, "cut": [LAYER + "1"]}, {"stages": 2, "cut": [LAYER + "3"]})
    ]
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    assert sizes[1][0] - sizes[0][0] == 2 * block and sum(sizes[0]) == sum(sizes[1])
