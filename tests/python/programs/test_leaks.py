# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Creating, training and destroying engines leaves nothing behind."""

import ctypes
import gc
import os
import time
import weakref

import models
import pytest
import torch
from conftest import run_processes, run_ranks

import deeptide

CYCLES = 50
WARM_UP = 10
# One engine of this model holds about 10 MiB (weights, two moments, gradients, buckets: 4 bytes x 0.5 M each), so one
# leaked in every ten cycles would show as 50 MiB. Free memory is given back before it is measured; what the arenas of
# ended threads still hold of it grows by some MiB in the first hundred cycles, then no more (10 MiB seen in 50).
TOLERANCE = 24 * 2**20


def model():
    return models.make_model(vocab=200, width=128, layers=4)


def tick(world, stage):
    made = model()
    engine, *_ = deeptide.initialize(model=made, config=models.config(stage), world=world)
    for tokens, targets in models.batches(2, 2, vocab=200):
        engine.backward(engine(tokens, targets))
        engine.step()
    engine.destroy()


def usage():
    """Resident bytes, and the numbers of file descriptors, threads and of our entries in /dev/shm."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    deeptide._C.release_idle_cpu_memory()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # Other programs have theirs there: only those that name this process or us count.
    shared = [name for name in os.listdir("/dev/shm") if "deeptide" in name or str(os.getpid()) in name]
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(shared)


def settled_usage(expected):
    """Sockets and threads of a closed connection end a little after it: waits until they have, at most 5 s."""
    for _ in range(50):
        found = usage()
        if all(number <= limit for number, limit in zip(found[1:], expected[1:], strict=True)):
            break
        time.sleep(0.1)
    return found


def assert_flat(cycle):
    for _ in range(WARM_UP):
        cycle()
    before = usage()
    for _ in range(CYCLES):
        cycle()
    after = settled_usage(before)
    resident, *counts = (now - then for now, then in zip(after, before, strict=True))
    assert resident < TOLERANCE, f"{resident / 2**20:.1f} MiB more after {CYCLES} cycles"
    assert all(count <= 0 for count in counts), f"descriptors, threads, shm: {before[1:]} became {after[1:]}"


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
def test_engines_of_a_world_of_one_leave_nothing(stage):
    assert_flat(lambda: tick(None, stage))


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
def test_engines_of_threads_leave_nothing(stage):
    assert_flat(lambda: run_ranks(2, tick, stage))


def cycle_in_process(stage):
    deeptide.init_distributed()
    assert_flat(lambda: tick(None, stage))


@pytest.mark.costly
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_engines_of_processes_leave_nothing(stage):
    run_processes(2, cycle_in_process, stage, timeout=300, fresh=True)


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
def test_engines_that_are_dropped_leave_nothing(stage):
    """Nobody calls destroy: the last reference ends the engine, and a failing rank's, too."""

    def cycle():
        engine, *_ = deeptide.initialize(model=model(), config=models.config(stage))
        engine.backward(engine(*models.batches(1, 2, vocab=200)[0]))

    assert_flat(cycle)


@pytest.mark.parametrize("rebuilt", [False, True])
def test_an_engine_that_its_model_holds_is_collected(rebuilt):
    made = models.make_model()
    engine, *_ = deeptide.initialize(model=made, config=models.config(1))
    if rebuilt:
        made.more = torch.nn.Linear(20, 20)
        engine.rebuild()
    made.engine = [engine]
    ended = weakref.ref(engine)
    del made, engine
    gc.collect()
    assert ended() is None


def test_a_destroyed_engine_leaves_a_model_without_hooks():
    made = models.make_model()
    for _ in range(3):
        engine, *_ = deeptide.initialize(model=made, config=models.config(1))
        engine.backward(engine(*models.batches(1, 2)[0]))
        engine.step()
        engine.destroy()
    made(*models.batches(1, 2)[0]).backward()
    plain = models.make_model()
    plain.load_state_dict(made.state_dict())
    plain(*models.batches(1, 2)[0]).backward()
    for (name, mine), other in zip(made.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad), name
