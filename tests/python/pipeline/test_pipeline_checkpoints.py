# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint has the names of the uncut model, and loads with any number of stages."""

import importlib
import json
import os

import pytest
import stages
import torch
from conftest import run_processes, run_ranks

import deeptide
from deeptide.pipeline import PipelineModule

GAS, BEFORE, AFTER = 2, 2, 2


class Counting(torch.nn.Module):
    """A buffer that forward changes, of its stage alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, given):
        self.count += 1
        return given


class Uncut(stages.Uncut):
    def __init__(self):
        super().__init__(tied=True)
        self.add_module("8", Counting())

    def forward(self, tokens):
        return getattr(self, "8")(super().forward(tokens))


def make(world, num_stages, stage):
    """num_stages 0: the uncut model in one module."""
    layers = [*stages.layers(tied=True), Counting()]
    model = PipelineModule(layers, num_stages, loss_fn=stages.loss_of, world=world) if num_stages else Uncut()
    settings = stages.config(stage, GAS, gradient_clipping=0.0)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    data_size = world.size // max(num_stages, 1)
    given = stages.batches(world.rank % data_size, data_size, BEFORE + AFTER, GAS)
    return engine, given, {} if num_stages else {"loss_fn": stages.loss_of}


def save(world, num_stages, stage, folder):
    engine, given, more = make(world, num_stages, stage)
    for _ in range(BEFORE):
        engine.train_batch(given, **more)
    engine.save_checkpoint(folder, client_state={"note": 7})
    states = stages.states_of(engine)
    losses = [engine.train_batch(given, **more).item() for _ in range(AFTER)]
    return states, losses


def load(world, num_stages, stage, folder):
    engine, given, more = make(world, num_stages, stage)
    path, client_state = engine.load_checkpoint(folder)
    assert path.endswith("global_step2") and client_state["note"] == 7 and engine.global_steps == BEFORE
    states = stages.states_of(engine)
    for name, buffer in engine.module.named_buffers():
        assert name == "8.count" and buffer.item() == BEFORE * GAS
    for _ in range(BEFORE * GAS):
        next(given)
    losses = [engine.train_batch(given, **more).item() for _ in range(AFTER)]
    return states, losses


def union(results):
    states = {}
    for each, _ in results:
        states |= each
    return states


# (ranks, stages) before and after; 0 stages: plain data parallelism
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((4, 2), (2, 0)), ((2, 0), (4, 2)), ((2, 2), (4, 4)), ((4, 4), (1, 1)), ((4, 2), (4, 2))],
    ids=str,
)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_loads_with_another_number_of_stages(saved, loaded, stage, tmp_path):
    before = run_ranks(saved[0], save, saved[1], stage, str(tmp_path))
    after = run_ranks(loaded[0], load, loaded[1], stage, str(tmp_path))
    states, again = union(before), union(after)
    assert states.keys() == again.keys() and len(states) == 3 * (6 * 6 + 1)
    assert all(torch.equal(again[name], value) for name, value in states.items())
    if saved[0] // max(saved[1], 1) == loaded[0] // max(loaded[1], 1):  # the same batches
        for _, losses in after:
            assert losses == pytest.approx(before[0][1], rel=0 if saved == loaded else 1e-5)


def misfit(world, folder):
    layers = stages.layers()
    if world.rank == 1:
        layers[-1] = torch.nn.Linear(3, 3)
    model = PipelineModule(layers, 2, loss_fn=stages.loss_of, world=world)
    engine = deeptide.initialize(model=model, config=stages.config(1, GAS), world=world)[0]
    before = stages.states_of(engine)
    with pytest.raises(deeptide.CheckpointError) as raised:
        engine.load_checkpoint(folder)
    assert all(torch.equal(value, before[name]) for name, value in stages.states_of(engine).items())
    return str(raised.value)


def save_untied(world, folder):
    model = PipelineModule(stages.layers(), 2, loss_fn=stages.loss_of, world=world)
    engine = deeptide.initialize(model=model, config=stages.config(1, GAS), world=world)[0]
    engine.train_batch(stages.batches(0, 1, 1, GAS))
    engine.save_checkpoint(folder)


def test_no_stage_loads_what_one_cannot(tmp_path):
    run_ranks(2, save_untied, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "latest"]
    texts = run_ranks(2, misfit, str(tmp_path))
    assert "7.weight" in texts[1] and "does not fit the model" in texts[1]
    assert texts[0] == "checking the checkpoint failed on another stage; see its error"


def save_beside(world, folder):
    """The batches that follow the call change nothing of what is saved."""
    model = PipelineModule(stages.layers(), 2, loss_fn=stages.loss_of, world=world)
    engine = deeptide.initialize(model=model, config=stages.config(1, GAS), world=world)[0]
    engine.train_batch(stages.batches(0, 1, 1, GAS))
    before = {name: value.clone() for name, value in stages.states_of(engine).items()}
    engine.save_checkpoint(folder, blocking=False)
    engine.train_batch(stages.batches(0, 1, 1, GAS))
    assert engine.wait_for_save() in (f"{folder}/global_step1", None)  # None: a step has told of it
    engine.load_checkpoint(folder)
    assert engine.global_steps == 1
    for name, value in stages.states_of(engine).items():
        assert torch.equal(value, before[name]), name


def test_a_pipeline_saves_beside_training(tmp_path):
    run_ranks(2, save_beside, str(tmp_path))


def train_process(num_stages, stage, folder):
    """A script as users have it: torch.distributed, no world given, DeepSpeed's names."""
    importlib.import_module("deeptide.as_deepspeed")
    deepspeed = importlib.import_module("deepspeed")
    pipe = importlib.import_module("deepspeed.pipe")
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    data_size = torch.distributed.get_world_size() // num_stages
    model = pipe.PipelineModule(stages.layers(tied=True), num_stages=num_stages, loss_fn=stages.loss_of)
    engine, _, _, _ = deepspeed.initialize(
        model=model, config=stages.config(stage, GAS), model_parameters=list(model.parameters())
    )
    assert engine.num_stages == num_stages and engine.get_data_parallel_rank() == rank % data_size
    assert engine.dp_world_size == data_size and engine.train_batch_size() == stages.MICRO * GAS * data_size
    groups = importlib.import_module("deepspeed.utils.groups")
    assert groups.mpu is engine.grid and engine.grid.get_stage_id() == engine.stage_id
    assert groups.get_data_parallel_rank() == rank % data_size and groups.get_data_parallel_world_size() == data_size
    assert torch.distributed.get_world_size(groups.get_data_parallel_group()) == data_size
    assert groups.get_model_parallel_world_size() == num_stages and groups.get_model_parallel_rank() == engine.stage_id
    assert groups.get_tensor_model_parallel_world_size() == 1
    with pytest.raises(ValueError, match=r"set_train_batch_size\(63\): expected a multiple of"):
        engine.set_train_batch_size(63)
    given = stages.batches(rank % data_size, data_size, BEFORE + AFTER, GAS)
    losses = [engine.train_batch(data_iter=given).item() for _ in range(BEFORE)]
    engine.save_checkpoint(folder)
    losses += [engine.train_batch(data_iter=given).item() for _ in range(AFTER)]
    print(json.dumps([losses, engine.get_global_grad_norm(), engine.is_first_stage()]))
    engine.destroy()
    assert groups.mpu is None and groups.get_data_parallel_world_size() == num_stages * data_size


@pytest.mark.costly
@pytest.mark.parametrize(("num_stages", "data_size", "stage"), [(2, 1, 0), (4, 1, 1), (2, 2, 3)])
def test_a_script_for_deepspeed_trains_as_the_uncut_model_does(num_stages, data_size, stage, tmp_path):
    done = run_processes(num_stages * data_size, train_process, num_stages, stage, str(tmp_path))
    results = [json.loads(process.stdout.splitlines()[-1]) for process in done]
    uncut = run_ranks(data_size, stages.train_uncut, stages.config(stage, GAS), GAS, BEFORE + AFTER, {"tied": True})
    for rank, (losses, norm, is_first) in enumerate(results):
        assert losses == pytest.approx(uncut[0][0], rel=1e-5)
        assert norm == pytest.approx(uncut[0][1][-1], rel=1e-4)
        assert is_first == (rank < data_size)


def grown(num_stages, first):
    """Losses and a weight of steps that begin with `first` micro-batches and go on with GAS."""
    importlib.import_module("deeptide.as_deepspeed")
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    data_size = torch.distributed.get_world_size() // num_stages
    model = importlib.import_module("deepspeed.pipe").PipelineModule(
        stages.layers(tied=True), num_stages=num_stages, loss_fn=stages.loss_of
    )
    engine, *_ = deepspeed.initialize(model=model, config=stages.config(1, first))
    engine.set_train_batch_size(stages.MICRO * GAS * data_size)
    assert engine.micro_batches == GAS == engine.gradient_accumulation_steps()
    given = stages.batches(torch.distributed.get_rank() % data_size, data_size, 3, GAS)
    losses = [engine.train_batch(data_iter=given).item() for _ in range(3)]
    weights = [float(parameter.detach().double().sum()) for parameter in engine.module.parameters()]
    print(json.dumps([losses, engine.get_global_grad_norm(), weights, engine.global_steps]))


def test_a_pipeline_takes_another_train_batch_size():
    outputs = [run_processes(2, grown, 2, first) for first in (GAS, 1, GAS + 1)]
    straight, *changed = [[json.loads(done.stdout.splitlines()[-1]) for done in output] for output in outputs]
    for ranks in changed:
        for mine, theirs in zip(ranks, straight, strict=True):
            assert mine[0] == pytest.approx(theirs[0], rel=1e-5) and mine[1] == pytest.approx(theirs[1], rel=1e-4)
            assert mine[2] == pytest.approx(theirs[2], rel=1e-5, abs=1e-6) and mine[3] == theirs[3] == 3
