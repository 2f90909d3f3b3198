# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models on an accelerator whose layers ranks share, beside the same models whole on a CPU."""

import gc
import json

import cut
import meshes
import models
import pytest
import torch.distributed as dist
from accelerated import DEVICE, begin
from conftest import run_processes, run_ranks

import deeptide


def placed(batch):
    return {name: value.to(DEVICE) for name, value in batch.items()}


def alone(kind, stage, gas, more):
    """(losses, norms) of the whole model on a CPU, with the batches of one data rank after the other."""
    world = deeptide.make_world(dist.HashStore(), 0, 1)
    return meshes.train(world, kind, meshes.config(kind, stage, gas=gas, **more), gas)[:3]


def placed_steps(engine, kind, gas):
    given = (placed(batch) for batch in meshes.batches(kind, engine, meshes.STEPS, gas))
    losses, norms = [], []
    for _ in range(meshes.STEPS):
        losses.append(engine.train_batch(given).item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def start(kind, config):
    return deeptide.initialize(model=models.to_device(meshes.make(kind), DEVICE), config=config)[0]


def train(kind, stage, gas, more, number):
    """Ranks that share layers, all on one batch: what they compute is what one rank does."""
    controls = begin()
    schedule = ("random", "late_default", "late_others")[number % 3]
    controls.configure(schedule, max_delay_us=300, seed=number, connections=number % 2, patience=20)
    expected, before = alone(kind, stage, gas, more), controls.used_bytes()
    engine = start(kind, meshes.config(kind, stage, tensor=2, gas=gas, **more))
    losses, norms = placed_steps(engine, kind, gas)
    cut.near(losses, expected[0], 1e-5, "losses")
    cut.near(norms, expected[1], 1e-4, "norms")
    for name, state in meshes.states(engine).items():
        cut.near(state.cpu(), expected[2][name], 2e-3, name, floor=1e-4)
    engine.destroy()
    assert controls.settle() == ""
    del engine, state
    gc.collect()
    assert controls.used_bytes() == before
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_ranks_that_share_layers_train_as_one(kind, stage):
    run_processes(2, train, kind, stage, 2, {}, stage, preload=("torch._dynamo",))


def train_twice_as_wide(stage):
    """Two teams of two, each with half of the batches."""
    controls = begin()
    controls.configure("late_default", max_delay_us=300, connections=1, patience=20)
    engine = start("llama", meshes.config("llama", stage, tensor=2, gas=2))
    losses, norms = placed_steps(engine, "llama", 2)
    assert engine.mesh == {"pipe": 1, "data": 2, "tensor": 2}
    assert controls.settle() == ""
    engine.destroy()
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, (losses, norms))
    assert results == [results[0]] * 4
    print(json.dumps([losses, norms]))
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_teams_train_on_other_batches(stage):
    done = run_processes(4, train_twice_as_wide, stage, preload=("torch._dynamo",))
    losses, norms = json.loads(done[0].stdout.strip().splitlines()[-1])
    expected = run_ranks(2, meshes.train, "llama", meshes.config("llama", stage, gas=2), 2)[0]
    cut.near(losses, expected[0], 1e-5, "losses")
    cut.near(norms, expected[1], 1e-4, "norms")
