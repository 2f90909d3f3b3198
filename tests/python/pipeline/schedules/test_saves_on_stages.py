# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Stages save at any moment what the last step left: within an accumulation, and after interrupts of train_batch."""

import os
import pathlib
import random
import signal
import threading
import time

import pytest
import stages
import torch
from conftest import run_processes
from test_pipeline_checkpoints import Counting

import deeptide
from deeptide.pipeline import PipelineModule

GAS = 3


def make(schedule, stage):
    deeptide.init_distributed()
    model = PipelineModule([*stages.layers(tied=True), Counting()], 2, loss_fn=stages.loss_of)
    settings = stages.config(stage, GAS, parallel={"schedule": schedule}, deeptide={"comm_timeout": 60})
    return deeptide.initialize(model=model, config=settings)[0]


def state_of(engine):
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    return {**stages.states_of(engine), **buffers, "steps": torch.tensor(engine.global_steps)}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def processes_of_all(folder, world):
    mine = os.path.join(folder, f"pid{world.rank}")
    pathlib.Path(mine + ".new").write_text(str(os.getpid()))
    os.rename(mine + ".new", mine)
    paths = [os.path.join(folder, f"pid{rank}") for rank in range(world.size)]
    while not all(map(os.path.exists, paths)):
        time.sleep(0.01)
    return [int(pathlib.Path(path).read_text()) for path in paths]


def interrupted(schedule, stage, seed, folder):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have left it ignored
    engine = make(schedule, stage)
    data_size = engine.world.size // 2
    given = stages.batches(engine.world.rank % data_size, data_size, 1, GAS)
    batches = list(given)  # of one step: each step trains on the same ones
    pids = processes_of_all(folder, engine.world)
    draws = random.Random(seed)
    saved = 0
    for number in range(5):
        delay = draws.uniform(0, 0.1)
        if engine.world.rank == 0:

            def interrupt(delay=delay):
                time.sleep(delay)
                for pid in pids:
                    os.kill(pid, signal.SIGINT)

            threading.Thread(target=interrupt).start()
        try:
            while True:
                engine.train_batch(iter(batches))
        except KeyboardInterrupt:
            engine.save_checkpoint(folder, tag=str(number))
            saved += 1
        before = state_of(engine)
        engine.load_checkpoint(folder, tag=str(number))
        assert_same(state_of(engine), before)
    resumed, count = state_of(engine), engine.global_steps
    engine.destroy()
    engine = make(schedule, stage)
    for _ in range(count):
        engine.train_batch(iter(batches))
    assert_same(state_of(engine), resumed)
    engine.destroy()


@pytest.mark.parametrize(("schedule", "stage", "ranks"), [("1f1b", 1, 2), ("gpipe", 0, 2), ("1f1b", 1, 4)])
def test_interrupts_of_a_pipelines_steps_leave_the_last_boundary(schedule, stage, ranks, tmp_path):
    run_processes(ranks, interrupted, schedule, stage, 3, str(tmp_path), timeout=150)
