# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A job that is started again, interrupted, or whose ranks diverge goes on, or ends soon."""

import json
import os
import pathlib
import signal
import sys
import threading
import time

import edges
import models
import pytest
import torch
from conftest import run_processes, run_ranks
from printed import run_captured

import deeptide

ended = threading.Event()  # for ranks as threads: the one that others wait for is through

# -- torchrun starts the ranks again ----------------------------------------------------------------------------------

FAILING = """
import os, signal, sys, torch, torch.distributed as dist
import deeptide, models

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if attempt == 1 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "first":
    deeptide.init_distributed()
    dist.all_reduce(torch.ones(1))
engine, *_ = deeptide.initialize(model=models.make_model(), config=models.config(1))
for step in range(3):
    tokens, targets = models.batches(step + 1, 4)[step]
    engine.backward(engine(tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]))
    engine.step()
    if attempt == 0 and rank == 1:
        raise ValueError("out of luck")
sys.stdout.write(f"rank {rank} done in attempt {attempt}\\n")
engine.destroy()
dist.destroy_process_group()
"""


def torchrun(script, *arguments, restarts):
    command = [os.path.join(os.path.dirname(sys.executable), "torchrun"), "--standalone", "--nproc-per-node", "2"]
    folders = [os.path.dirname(os.path.dirname(deeptide.__file__)), os.path.dirname(models.__file__)]
    search = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    return run_captured(
        [*command, "--max-restarts", str(restarts), str(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
        timeout=180,
    )


@pytest.mark.slow
@pytest.mark.parametrize("init_distributed", ["first", "within"])
def test_ranks_that_torchrun_starts_again_train(init_distributed, tmp_path):
    """The agent's store keeps what earlier attempts left there: here one that met and one that a rank never joined."""
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    done = torchrun(script, init_distributed, restarts=2)
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} done in attempt 2" for rank in (0, 1)]


# -- the boundary moves after backward --------------------------------------------------------------------------------


def move_the_boundary(world, stage, bf16):
    engine = edges.start(world, stage, bf16=bf16, deeptide={"comm_timeout": 15})
    skip = world.rank == 1  # this rank has sent fewer buckets than the other
    batches = [edges.inputs(world.rank, step).to(torch.bfloat16 if bf16 else torch.float32) for step in range(2)]
    losses = [engine(x, skip=skip).float().square().mean() for x in batches]
    engine.backward(losses[0])
    engine.set_gradient_accumulation_boundary(False)
    assert not engine.step()
    assert engine.global_steps == 0
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(losses[1])
    assert engine.step()
    return edges.final_state(engine)


@pytest.mark.both_ways
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_boundary_may_move_after_backward_on_ranks_that_diverge(stage, bf16):
    ranks = run_ranks(2, move_the_boundary, stage, bf16)
    model, optimizer = edges.plain()
    losses = [model(edges.inputs(rank, step), skip=rank == 1).square().mean() for step in range(2) for rank in range(2)]
    edges.plain_update(model, optimizer, losses, ranks=2)
    if not bf16:
        edges.assert_trained_as(ranks[1], model)
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name, _ in model.named_parameters())


# -- a load fails on one rank -----------------------------------------------------------------------------------------


def load_into_a_view(world, stage, folder):
    """Rank 1's buffer shares its elements, so that nothing can be copied into it."""
    engine = edges.start(world, stage, deeptide={"comm_timeout": 15})
    edges.train(engine, rank=world.rank)
    engine.save_checkpoint(folder)
    if world.rank == 1:
        engine.module.mean = torch.zeros(1).expand(6)
    with pytest.raises(deeptide.CheckpointError) as error:
        engine.load_checkpoint(folder)
    engine.module.mean = torch.zeros(6)
    assert engine.load_checkpoint(folder)[0] is not None
    edges.train(engine, rank=world.rank)
    engine.destroy()
    return str(error.value)


@pytest.mark.both_ways
@pytest.mark.parametrize("stage", [0, 3])
def test_a_buffer_that_cannot_be_restored_on_one_rank_is_an_error_on_all(stage, tmp_path):
    other, own = run_ranks(2, load_into_a_view, stage, str(tmp_path))
    assert "restoring buffers failed on rank 1" in other, other
    assert "single memory location" in own, own


# -- ^C ---------------------------------------------------------------------------------------------------------------


def interrupt_inside(name):
    """Sends this process ^C once its main thread stands still below the package's function `name`: it waits there."""
    main = threading.main_thread().ident
    package = os.path.dirname(deeptide.__file__)

    def place():
        """The instruction that the main thread executes; None if it is elsewhere."""
        top = frame = sys._current_frames()[main]
        while frame is not None:
            if frame.f_code.co_name == name and frame.f_code.co_filename.startswith(package):
                return id(top), top.f_lasti
            frame = frame.f_back
        return None

    def watch():
        before, looks = None, 0
        while looks < 20:
            now = place()
            looks = looks + 1 if now is not None and now == before else 0
            before = now
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def wait_inside(place):
    """The call in which this rank must wait for the other."""
    if place == "init_distributed":
        return deeptide.init_distributed
    deeptide.init_distributed()
    if place == "initialize":
        return edges.start
    engine = edges.start(stage=3 if place == "forward" else 1, deeptide={"comm_timeout": 30})
    if place == "forward":
        return lambda: engine(edges.inputs())
    loss = engine(edges.inputs()).square().mean() if engine.world.rank == 0 or place == "step" else None
    if place == "backward":
        return lambda: [engine.backward(loss, retain_graph=True) for _ in range(20)]
    engine.backward(loss)
    return engine.step


def wait_and_be_interrupted(place, folder):
    """A rank waits for one that goes on only when the first has seen its ^C; after its wait it would see CommError."""
    told = pathlib.Path(folder) / "told"
    waiting = 1 if place == "init_distributed" else 0  # rank 0 does not wait for others there
    own = int(os.environ["RANK"]) == waiting
    if own or place not in ("init_distributed", "initialize"):
        wait = wait_inside(place)
    elif place == "initialize":
        deeptide.init_distributed()
    if not own:
        while not told.exists():
            time.sleep(0.01)
        return
    interrupt_inside(place)
    try:
        wait()
    except KeyboardInterrupt as interrupt:
        assert interrupt.__context__ is None, "it came when the wait had ended with an error"
        told.touch()
        sys.exit(3)


@pytest.mark.costly
@pytest.mark.both_ways
@pytest.mark.parametrize("place", ["init_distributed", "initialize", "forward", "backward", "step"])
def test_an_interrupt_ends_a_wait_for_another_rank(place, tmp_path, request):
    if place == "forward" and "shared" in request.node.name:
        pytest.skip("nothing is gathered where ranks share parameters")
    waiting = 1 if place == "init_distributed" else 0
    done = run_processes(2, wait_and_be_interrupted, place, str(tmp_path), check=False, timeout=90)
    assert done[waiting].returncode == 3, done[waiting].stderr
    assert done[1 - waiting].returncode == 0, done[1 - waiting].stderr


def call_from_a_handler(folder):
    deeptide.init_distributed()
    engine = edges.start(stage=1, deeptide={"comm_timeout": 30})
    told = pathlib.Path(folder) / "told"
    loss = engine(edges.inputs()).square().mean()
    if engine.world.rank == 0:
        words = []

        def handler(*_):
            for call in (engine.step, lambda: engine.backward(loss), lambda: engine.save_checkpoint(folder)):
                with pytest.raises(RuntimeError) as error:
                    call()
                words.append(str(error.value))
            told.touch()

        signal.signal(signal.SIGINT, handler)
        interrupt_inside("step")
    else:
        while not told.exists():
            time.sleep(0.01)
    engine.backward(loss)
    assert engine.step()
    if engine.world.rank == 0:
        print(json.dumps(words))


def test_a_handler_that_interrupts_a_wait_is_told_not_to_use_the_engine(tmp_path):
    done = run_processes(2, call_from_a_handler, str(tmp_path), timeout=90)
    words = json.loads(done[0].stdout.splitlines()[-1])
    for text, method in zip(words, ("step()", "backward()", "save_checkpoint()"), strict=True):
        assert f"the handler of a signal called {method}" in text and "set a flag" in text, text


# -- many backward passes ahead of a late rank ------------------------------------------------------------------------


def go_backward_often(world, stage, passes, evaluations):
    """Rank 0 is `passes` rounds ahead of rank 1, which evaluates meanwhile, steps, and cannot step without rank 0."""
    zero = {"stage3_max_live_parameters": 1}  # so that each evaluation gathers
    engine = edges.start(world, stage, zero=zero, deeptide={"comm_timeout": 60, "unit_size": 1})
    for step in range(2):
        for number in range(passes if world.rank == 0 else evaluations):
            if world.rank == 0:
                engine.backward(engine(edges.inputs(0, 100 * step + number)).square().mean())
            else:
                with torch.no_grad():
                    engine(edges.inputs(1, number))
        assert engine.step()
    for line in engine.memory():
        if line.role == "communication":
            assert line.measured_bytes <= 1.02 * line.predicted_bytes, line
            assert line.measured_late_bytes <= line.late_bytes, line
    return edges.final_state(engine)


@pytest.mark.costly
@pytest.mark.both_ways
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_rank_many_backward_passes_ahead_of_another_waits(stage):
    ranks = run_ranks(2, go_backward_often, stage, 20, 20)
    model, optimizer = edges.plain()
    for step in range(2):
        losses = [model(edges.inputs(0, 100 * step + number)).square().mean() for number in range(20)]
        edges.plain_update(model, optimizer, losses, ranks=2)
    for state in ranks:
        edges.assert_trained_as(state, model)


def leave_one_far_ahead(world, stage):
    engine = edges.start(world, stage, deeptide={"comm_timeout": 2})
    if world.rank == 1:
        ended.wait(60)
        return None
    try:
        for number in range(20):
            engine.backward(engine(edges.inputs(0, number)).square().mean())
    except deeptide.CommError as error:
        return str(error)
    finally:
        ended.set()


@pytest.mark.both_ways
def test_a_rank_far_ahead_of_a_silent_one_waits_for_the_timeout():
    ended.clear()
    text, _ = run_ranks(2, leave_one_far_ahead, 1)
    assert "rank 0 timed out after 2" in text and "backward, reducing gradients of unit" in text, text
    assert "no report from rank 1" in text, text
