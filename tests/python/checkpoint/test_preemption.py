# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A scheduler's signal to any rank: all save at one step and end with the code that asks for another run."""

import os
import signal
import time

import models
import pytest
import torch
import torch.distributed as dist
from conftest import run_processes

import deeptide

CODE = 77


def start(stage, folder, deadline=60.0, **extra):
    checkpoint = {"on_preempt": {"folder": folder, "exit_code": CODE, "deadline": deadline}}
    return deeptide.initialize(model=models.make_model(), config=models.config(stage, checkpoint=checkpoint, **extra))[
        0
    ]


def train(engine, first, last):
    losses = []
    for step in range(first, last):
        for micro in range(engine.gradient_accumulation_steps()):
            seed = 100 * step + 10 * micro + engine.global_rank
            tokens = torch.randint(37, (4, 7), generator=torch.Generator().manual_seed(seed))
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def get_signal(where, name, victim, stage, folder):
    """One rank gets the signal: before training, or within an accumulation."""
    deeptide.init_distributed()
    engine = start(stage, folder, gas=2)
    engine.client_state_on_preempt = lambda: {"epoch": 5}
    first = 0 if where == "warm-up" else 2
    train(engine, 0, first)
    if engine.global_rank == victim:
        os.kill(os.getpid(), getattr(signal, name))
    train(engine, first, first + 2)
    raise AssertionError("the signal was lost")


def go_on(stage, folder, step):
    deeptide.init_distributed()
    engine = start(stage, folder, gas=2)
    path, state = engine.load_checkpoint(folder)
    assert (path, state) == (f"{folder}/global_step{step}", {"epoch": 5})
    straight = start(stage, folder, gas=2)
    train(straight, 0, step)
    assert train(engine, step, step + 2) == train(straight, step, step + 2)


@pytest.mark.costly
@pytest.mark.parametrize("where", ["warm-up", "training"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_save_at_the_step_after_a_signal(where, name, victim, stage, tmp_path):
    folder = str(tmp_path)
    ranks = run_processes(2, get_signal, where, name, victim, stage, folder, check=False)
    assert [rank.returncode for rank in ranks] == [CODE, CODE], ranks[0].stderr
    assert f"rank {victim} got signal" in ranks[victim].stderr
    step = 1 if where == "warm-up" else 3
    assert "this run was asked to go" in ranks[0].stderr and f"exit code {CODE}" in ranks[0].stderr
    run_processes(2, go_on, stage, folder, step)


def evaluate_for_ever(engine):
    engine.eval()
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    end = time.monotonic() + 60
    with torch.no_grad():
        while time.monotonic() < end:
            engine(tokens)
    raise AssertionError("the signal was lost")


def get_signal_in_evaluation(who, victim, stage, folder):
    """All ranks evaluate, or rank 0 alone while the other waits for it in its next step."""
    deeptide.init_distributed()
    engine = start(stage, folder, deadline=2.0)
    engine.client_state_on_preempt = lambda: {"epoch": 5}
    train(engine, 0, 3)
    if engine.global_rank == victim:
        os.kill(os.getpid(), signal.SIGTERM)
    if who == "all" or engine.global_rank == 0:
        evaluate_for_ever(engine)
    train(engine, 3, 4)
    raise AssertionError("the signal was lost")


@pytest.mark.costly
@pytest.mark.parametrize("who", ["all", "rank 0"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_evaluate_save_where_they_are(who, victim, stage, tmp_path):
    ranks = run_processes(2, get_signal_in_evaluation, who, victim, stage, str(tmp_path), check=False)
    assert [rank.returncode for rank in ranks] == [CODE, CODE], ranks[0].stderr + ranks[1].stderr
    assert (tmp_path / "latest").read_text() == "global_step3"


def save_beside_first(folder):
    deeptide.init_distributed()
    engine = start(2, folder)
    train(engine, 0, 1)
    engine.save_checkpoint(folder, tag="beside", blocking=False)
    os.kill(os.getpid(), signal.SIGUSR1)
    train(engine, 1, 2)


def test_a_save_beside_training_is_finished_first(tmp_path):
    ranks = run_processes(2, save_beside_first, str(tmp_path), check=False)
    assert [rank.returncode for rank in ranks] == [CODE, CODE], ranks[0].stderr
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["beside", "global_step2", "latest"]


def test_handlers_come_back_with_the_engines_end(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    world = deeptide.make_world(dist.HashStore(), 0, 1)
    checkpoint = {"on_preempt": {"folder": str(tmp_path), "signals": ["SIGUSR1"]}}
    engine = deeptide.initialize(
        model=models.make_model(), config=models.config(0, checkpoint=checkpoint), world=world
    )[0]
    caught = []
    engine.destroy()
    signal.signal(signal.SIGUSR1, lambda *_: caught.append(1))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert caught == [1]
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_cannot_be_taken_is_named(tmp_path):
    checkpoint = {"on_preempt": {"folder": str(tmp_path), "signals": ["SIGKILL"]}}
    with pytest.raises(deeptide.ConfigError, match="got 'SIGKILL', expected SIGTERM, SIGUSR1 or SIGUSR2"):
        deeptide.initialize(model=models.make_model(), config=models.config(0, checkpoint=checkpoint))
