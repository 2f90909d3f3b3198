# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models on accelerators, in stages or with layers that ranks share, beside the same models whole on a CPU."""

import gc
import json

import cut
import meshes
import models
import pytest
import torch
import torch.distributed as dist
from accelerated import DEVICE, begin
from conftest import run_processes, run_ranks

import deeptide

GAS = 3


def placed(batch):
    return {name: value.to(DEVICE) for name, value in batch.items()}


def alone(kind, stage):
    """(losses, norms, states) of the whole model on a CPU, with the batches of one data rank."""
    world = deeptide.make_world(dist.HashStore(), 0, 1)
    return meshes.train(world, kind, meshes.config(kind, stage, gas=GAS), GAS)[:3]


def placed_steps(engine, kind, gas):
    given = (placed(batch) for batch in meshes.batches(kind, engine, meshes.STEPS, gas))
    losses, norms = [], []
    for _ in range(meshes.STEPS):
        losses.append(engine.train_batch(given).item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def start(kind, config):
    return deeptide.initialize(model=models.to_device(meshes.make(kind), DEVICE), config=config)[0]


def train(kind, stage, parallel, number):
    """Two ranks on one data rank's batches: losses, norms and states of the whole model on a CPU."""
    controls = begin()
    schedule = ("random", "late_default", "late_others")[number % 3]
    aliasing = number % 2 if "tensor" in parallel else 0  # queues of the hardware that all streams share
    controls.configure(schedule, max_delay_us=300, seed=number, connections=aliasing, patience=20)
    expected, before = alone(kind, stage), controls.used_bytes()
    engine = start(kind, meshes.config(kind, stage, gas=GAS, parallel=parallel))
    losses, norms = placed_steps(engine, kind, GAS)
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
    run_processes(2, train, kind, stage, {"tensor": 2}, stage, preload=("torch._dynamo",))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_stages_train_as_one(kind, schedule, stage):
    run_processes(2, train, kind, stage, {"pipeline": 2, "schedule": schedule}, stage, preload=("torch._dynamo",))


def train_on_a_mesh(stage, pipeline, tensor):
    controls = begin()
    controls.configure("late_default", max_delay_us=300, patience=20)
    engine = start("llama", meshes.config("llama", stage, pipeline=pipeline, tensor=tensor, gas=GAS))
    losses, norms = placed_steps(engine, "llama", GAS)
    assert controls.settle() == ""
    data = engine.data_parallel_size
    engine.destroy()
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, (losses, norms))
    assert results == [results[0]] * 4
    print(json.dumps([losses, norms, data]))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [(mesh, stage) for mesh in ((1, 2), (2, 1), (2, 2)) for stage in range(4)],
    ids=str,
)
def test_four_ranks_train_as_the_whole_model_on_other_batches(mesh, stage):
    done = run_processes(4, train_on_a_mesh, stage, *mesh, preload=("torch._dynamo",))
    losses, norms, data = json.loads(done[0].stdout.strip().splitlines()[-1])
    assert data == 4 // (mesh[0] * mesh[1])
    expected = run_ranks(data, meshes.train, "llama", meshes.config("llama", stage, gas=GAS), GAS)[0]
    cut.near(losses, expected[0], 1e-5, "losses")
    cut.near(norms, expected[1], 1e-4, "norms")


def text_of(model, device):
    tokens = torch.arange(8).view(2, 4).to(device)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "no_repeat_ngram_size": 2}
    return model.eval().generate(tokens, attention_mask=torch.ones_like(tokens), **options).tolist()


def generate_in_stages(kind):
    """Text of the whole model on a CPU, after a step of each."""
    controls = begin()
    controls.configure("late_default", max_delay_us=300, patience=20)
    world = deeptide.make_world(dist.HashStore(), 0, 1)
    whole = deeptide.initialize(model=meshes.make(kind), config=meshes.config(kind, 1, gas=1), world=world)[0]
    whole.train_batch(iter(meshes.batches(kind, whole, 1, 1)))
    engine = start(kind, meshes.config(kind, 3, gas=1, parallel={"pipeline": 2}))
    engine.train_batch(placed(batch) for batch in meshes.batches(kind, engine, 1, 1))
    assert text_of(engine.module, DEVICE) == text_of(whole.module, "cpu")
    drawn = engine.module.generate(torch.ones(1, 2, dtype=torch.long, device=DEVICE), max_new_tokens=6, do_sample=True)
    assert drawn.device.type == torch.device(DEVICE).type
    found = [None] * 2
    dist.all_gather_object(found, drawn.tolist())
    assert found[0] == found[1]
    assert controls.settle() == ""
    engine.destroy()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_stages_generate_as_one(kind):
    run_processes(2, generate_in_stages, kind, preload=("torch._dynamo",))
