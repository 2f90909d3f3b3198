# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""engine.snapshot(): a copy that keeps its numbers in a forked child, or in a thread, while training goes on."""

import json
import os
import threading

import models
import pytest
import torch
from conftest import run_processes, run_ranks

import deeptide

TOKENS, TARGETS = models.batches(1, 2)[0]


class Keeping(models.TinyModel):
    """Keeps results of its last forward, as models do for an auxiliary loss; has dropout and a buffer."""

    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, tokens, targets):
        self.seen += 1
        self.auxiliary = self.drop(self.embed(tokens)).square().mean()
        return super().forward(tokens, targets)


def start(world=None, stage=0):
    return deeptide.initialize(model=models.make_model(kind=Keeping), config=models.config(stage), world=world)[0]


def train(engine, steps):
    for _ in range(steps):
        engine.backward(engine(TOKENS, TARGETS))
        assert engine.step()


def values_of(model):
    """A loss and a sum of raw bytes."""
    with torch.no_grad():
        return [model(TOKENS, TARGETS).item(), float(model.h[1].up.weight.detach().numpy().sum())]


def _child(snapshot, go, results):
    for _ in range(2):
        os.read(go, 1)
        os.write(results, (json.dumps(values_of(snapshot)) + "\n").encode())
    os._exit(0)


def fork_and_train(stage, shared):
    deeptide.init_distributed()
    torch.set_num_threads(1)
    os.environ["DEEPTIDE_TEST_APART"] = "0" if shared else "1"
    engine = start(stage=stage)
    train(engine, 2)
    snapshot = engine.snapshot()
    (go, tell), (read, results) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _child(snapshot, go, results)
    answers = os.fdopen(read)
    os.write(tell, b".")
    before = json.loads(answers.readline())
    here = values_of(snapshot)
    train(engine, 3)
    os.write(tell, b".")
    assert json.loads(answers.readline()) == before == here == values_of(snapshot)
    assert engine.eval()(TOKENS, TARGETS).item() != before[0]
    assert os.waitpid(child, 0)[1] == 0
    engine.destroy()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_forked_child_keeps_its_numbers_while_training_goes_on(stage, shared):
    run_processes(2, fork_and_train, stage, shared)


@pytest.mark.both_ways
@pytest.mark.parametrize("stage", [0, 3])
def test_a_snapshot_is_the_model_in_eval_mode_without_gradients(stage):
    def run(world):
        engine = start(world, stage)
        train(engine, 1)
        snapshot = engine.snapshot()
        assert engine.module.training and not any(module.training for module in snapshot.modules())
        assert all(p.requires_grad for p in engine.module.parameters())
        assert not any(p.requires_grad for p in snapshot.parameters())
        assert snapshot.head.weight is snapshot.embed.weight
        state = engine.module_state_dict()
        assert state.keys() == snapshot.state_dict().keys()
        assert all(torch.equal(value, snapshot.state_dict()[name]) for name, value in state.items())
        engine.destroy()
        return values_of(snapshot)

    one, other = run_ranks(2, run)
    assert one == other


@pytest.mark.both_ways
def test_a_thread_evaluates_a_snapshot_while_training_goes_on():
    def run(world):
        engine = start(world, 3)
        train(engine, 1)
        snapshot = engine.snapshot()
        expected = values_of(snapshot)
        trained, found = threading.Event(), []

        def evaluate():
            torch.set_num_threads(1)
            while not trained.is_set() or not found:
                found.append(values_of(snapshot))

        thread = threading.Thread(target=evaluate)
        thread.start()
        train(engine, 4)
        trained.set()
        thread.join()
        engine.destroy()
        assert all(values == expected for values in found)

    run_ranks(2, run)


class Locked(models.TinyModel):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_a_model_that_cannot_be_copied_says_why():
    engine = deeptide.initialize(model=Locked(), config=models.config(0))[0]
    with pytest.raises(TypeError, match="cannot pickle") as caught:
        engine.snapshot()
    assert "engine.snapshot() deep-copies Locked" in str(caught.value)
