# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A rank that fails, dies or goes its own way ends the others soon, with an error that names it."""

import json
import os
import re
import signal
import sys
import threading
import time

import models
import pytest
import torch
from conftest import run_processes, run_ranks

import deeptide

pytestmark = pytest.mark.both_ways

# Far below the comm_timeout of these tests (60 s): a failure is reported, not timed out.
SOON = 15


def start(world, stage, **extra):
    model = models.make_model()
    return deeptide.initialize(model=model, config=models.config(stage, **extra), world=world)[0]


def batch_of(rank, step=0):
    tokens, targets = models.batches(step + 1, 8)[step]
    return tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]


def train(engine, steps=1):
    for step in range(steps):
        engine.backward(engine(*batch_of(engine.world.rank, step)))
        engine.step()


def out_of_luck(*_):
    raise ValueError("out of luck")


def fail_in_forward(world, stage, failing):
    engine = start(world, stage)
    train(engine)
    if world.rank == failing:
        engine.module.h[1].register_forward_hook(out_of_luck)
    begin = time.monotonic()
    try:
        train(engine)
    except Exception as error:
        return type(error), str(error), time.monotonic() - begin
    finally:
        engine.destroy()


@pytest.mark.costly
@pytest.mark.parametrize(("world", "failing"), [(2, 1), (3, 0), (3, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_exception_in_forward_on_one_rank_ends_the_others(stage, world, failing):
    results = run_ranks(world, fail_in_forward, stage, failing)
    for rank, (kind, text, seconds) in enumerate(results):
        if rank == failing:
            assert kind is ValueError and text == "out of luck"
            continue
        assert kind is deeptide.CommError, text
        assert f"rank {rank} " in text and "step 1" in text, text
        # Another survivor may be reported first: it ended because the failing rank was gone, and says so.
        assert f"rank {failing} raised ValueError in forward: out of luck" in text, text
        assert seconds < SOON


# -- a rank that raises and keeps its engine --------------------------------------------------------------------------


class Unlucky:
    """A learning-rate schedule that fails once the step is done."""

    step = out_of_luck


def raise_in(call, engine, folder):
    if call == "forward":
        engine.module.h[1].register_forward_hook(out_of_luck)
    elif call == "backward":
        engine.module.h[1].register_full_backward_hook(out_of_luck)
    elif call == "step":
        engine.lr_scheduler = Unlucky()
    train(engine)
    engine.save_checkpoint(folder, client_state={"schedule": Unlucky()})


def raise_and_stay(world, stage, call, folder, ended):
    """Rank 1 raises; its program catches that and waits, with the engine alive, until the others have ended."""
    engine = start(world, stage, deeptide={"comm_timeout": 600, "error_grace": 1})
    train(engine)
    try:
        if world.rank == 1:
            raise_in(call, engine, folder)
        train(engine, 2)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    ended.wait(100)
    engine.destroy()
    return text


@pytest.mark.costly
@pytest.mark.parametrize("call", ["forward", "backward", "step", "save_checkpoint"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_raises_and_keeps_its_engine_ends_the_others(stage, call, tmp_path):
    texts = run_ranks(3, raise_and_stay, stage, call, str(tmp_path), threading.Barrier(3))
    error = "ConfigError" if call == "save_checkpoint" else "ValueError"
    assert texts[1].startswith(error), texts[1]
    line = texts[1].removeprefix(f"{error}: ")[:40]
    for rank in (0, 2):
        assert texts[rank].startswith(f"CommError: rank {rank} "), texts[rank]
        assert f"rank 1 raised {error} in {call}: {line}" in texts[rank], texts[rank]
        assert 'has not gone on within 1 s ("deeptide": {"error_grace": seconds})' in texts[rank], texts[rank]


def skip_a_batch(world, stage):
    """Rank 1 fails in a forward, takes the next batch, and takes its time for it: longer than an error may stand."""
    engine = start(world, stage, deeptide={"error_grace": 3})
    train(engine)
    if world.rank == 1:
        hook = engine.module.h[1].register_forward_hook(out_of_luck)
        with pytest.raises(ValueError, match="out of luck"):
            engine(*batch_of(1, 1))
        hook.remove()
        time.sleep(1)  # the others wait in step() and hear of it
        engine.backward(engine(*batch_of(1, 1)))
        time.sleep(4)
        engine.step()
    else:
        train(engine)
    train(engine)
    state = engine.module_state_dict()
    engine.destroy()
    return state


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_goes_on_after_an_error_ends_nobody(stage):
    one, other = run_ranks(2, skip_a_batch, stage)
    assert all(torch.equal(one[name], other[name]) for name in one)


def leave_without_word(world, stage):
    """Rank 1 stops but keeps its engine, so that nobody tells the others; they have the timeout."""
    engine = start(world, stage, deeptide={"comm_timeout": 2})
    train(engine)
    if world.rank == 1:
        time.sleep(6)
        return None
    begin = time.monotonic()
    with pytest.raises(deeptide.CommError) as error:
        train(engine)
    return str(error.value), time.monotonic() - begin


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
def test_a_silent_rank_is_named_after_the_timeout(stage):
    text, seconds = run_ranks(2, leave_without_word, stage)[0]
    assert "rank 0 timed out after 2" in text and "no report from rank 1" in text and '"comm_timeout"' in text, text
    assert seconds < 6


# -- real processes ---------------------------------------------------------------------------------------------------


def raise_and_stay_in_process(stage, folder):
    deeptide.init_distributed()
    engine = start(None, stage, deeptide={"comm_timeout": 600, "error_grace": 1})
    rank = engine.world.rank
    train(engine)
    try:
        if rank == 1:
            raise_in("forward", engine, folder)
        train(engine)
    except deeptide.CommError as error:
        print(json.dumps(str(error)), flush=True)
    except ValueError as error:
        print(json.dumps(str(error)), flush=True)
    open(os.path.join(folder, str(rank)), "w").close()
    while len(os.listdir(folder)) < 3:
        time.sleep(0.05)
    os._exit(0)  # nobody waits for the engine's end


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
def test_a_process_that_raises_and_stays_ends_the_others(stage, tmp_path):
    results = run_processes(3, raise_and_stay_in_process, stage, str(tmp_path), timeout=90)
    texts = [json.loads(result.stdout.splitlines()[-1]) for result in results]
    assert texts[1] == "out of luck"
    for rank in (0, 2):
        assert "rank 1 raised ValueError in forward: out of luck" in texts[rank], texts[rank]


def kill_at(place, engine):
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if place == "gather":
        engine.module.embed.register_forward_pre_hook(die)
    elif place == "forward":
        engine.module.h[1].register_forward_hook(die)
    elif place == "backward":
        engine.module.h[1].register_full_backward_hook(die)
    elif place == "step":
        engine.step = die


def be_killed(stage, place, victim, late):
    deeptide.init_distributed()
    engine = start(None, stage)
    rank = engine.world.rank
    train(engine)
    if rank == victim:
        kill_at(place, engine)
    if rank == late:
        time.sleep(3)  # by then others have ended because the victim had
    begin = time.time()
    try:
        train(engine)
    except deeptide.CommError as error:
        print(json.dumps([str(error), time.time() - begin]))
        sys.exit(3)


def killed_as_told(place, stage, victim, late=None):
    """The numbers by which each survivor names the ranks that were killed."""
    results = run_processes(3, be_killed, stage, place, victim, late, timeout=90, check=False)
    told = {}
    for rank, result in enumerate(results):
        if rank == victim:
            assert result.returncode == -signal.SIGKILL
            continue
        assert result.returncode == 3, result.stderr
        text, seconds = json.loads(result.stdout.splitlines()[-1])
        assert f"rank {rank} " in text and "step 1" in text, text
        assert seconds < SOON
        told[rank] = (set(map(int, re.findall(r"rank (\d+)'s process \d+ has ended", text))), text)
    return told


@pytest.mark.costly
@pytest.mark.parametrize("place", ["gather", "forward", "backward", "step"])
@pytest.mark.parametrize(("stage", "victim"), [(0, 1), (3, 1), (3, 0), (3, 2)])
def test_survivors_of_a_killed_rank_end_soon_and_name_it(stage, place, victim):
    for ranks, text in killed_as_told(place, stage, victim).values():
        assert ranks == {victim}, text


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
def test_a_late_survivor_names_the_killed_rank_too(stage, request):
    """Rank 0, which holds the store, has ended meanwhile, because rank 1 was killed."""
    told = killed_as_told("forward", stage, victim=1, late=2)
    assert told[0][0] == {1}, told[0][1]
    shares = "shared" in request.node.name
    assert told[2][0] == {1} if shares else 1 in told[2][0], told[2][1]


def raise_in_process(stage):
    deeptide.init_distributed()
    engine = start(None, stage)
    train(engine)
    if engine.world.rank == 1:
        raise ValueError("out of luck")
    train(engine)


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
def test_a_process_that_ends_with_an_exception_ends_the_others(stage):
    begin = time.monotonic()
    survivor, failed = run_processes(2, raise_in_process, stage, timeout=90, check=False, fresh=True)
    assert time.monotonic() - begin < 60
    assert failed.returncode == 1 and "out of luck" in failed.stderr
    assert survivor.returncode == 1 and "CommError" in survivor.stderr and "rank 1" in survivor.stderr


# -- ranks that call different things ---------------------------------------------------------------------------------

CALLS = {
    "step()": lambda engine, folder: train(engine),
    "save_checkpoint()": lambda engine, folder: engine.save_checkpoint(folder),
    "load_checkpoint()": lambda engine, folder: engine.load_checkpoint(folder),
    "module_state_dict(), full_state() or the like": lambda engine, folder: engine.module_state_dict(),
    "empty_partition_cache()": lambda engine, folder: engine.empty_partition_cache(),
    "offload_states() or reload_states()": lambda engine, folder: engine.offload_states(),
}


def call_differently(world, stage, names, folder):
    engine = start(world, stage)
    train(engine)
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()} if stage == 0 else {}
    with pytest.raises(deeptide.CommError) as error:
        CALLS[names[world.rank]](engine, folder)
    assert all(torch.equal(before[name], p) for name, p in engine.module.named_parameters() if name in before)
    engine.destroy()
    return str(error.value)


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("second", [name for name in CALLS if name != "step()"])
def test_ranks_that_do_different_things_are_told_both(second, stage, tmp_path):
    for names in (["step()", second], [second, "step()"]):
        for text in run_ranks(2, call_differently, stage, names, str(tmp_path)):
            assert f"rank 0 called {names[0]}, rank 1 called {names[1]}" in text, text
    assert os.listdir(tmp_path) == []
