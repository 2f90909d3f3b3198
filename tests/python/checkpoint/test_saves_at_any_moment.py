# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A save at any moment holds what the last step left, or is an error that leaves the last checkpoint alive."""

import os
import pathlib
import random
import signal
import threading
import time

import pytest
import torch
from conftest import run_processes
from test_checkpoint import Dropping, assert_same, start, train, weights_of
from torch import nn

import deeptide

STAGES = (0, 1, 2, 3)


class Normed(Dropping):
    """With running statistics, which no version counter counts, and a large buffer that each forward changes."""

    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(20)
        self.register_buffer("large", torch.zeros(600_000))

    def forward(self, tokens, targets):
        self.large += 1
        hidden = self.batch_norm(self.embed(tokens).flatten(0, -2).float())
        return super().forward(tokens, targets) + hidden.square().mean()


def state_of(engine):
    """All that a resume restores, of this rank. Collective."""
    loader = engine.training_dataloader
    return {
        **weights_of(engine),
        "generator": torch.get_rng_state(),
        "position": torch.tensor(loader.position()),
        "steps": torch.tensor([engine.global_steps, engine.micro_steps]),
        "rates": torch.tensor(engine.get_lr()),
    }


def save_within(stage, folder):
    deeptide.init_distributed()
    engine, loader = start(None, stage, kind=Normed, gas=3)
    torch.manual_seed(engine.world.rank)
    train(engine, loader, 2)
    boundary = state_of(engine)
    moments = iter(("forward", "backward", "step", "forward2", "backward2"))

    def save():
        engine.save_checkpoint(folder, tag=next(moments))

    for _ in range(2):
        loss = engine(*next(loader))
        save()
        engine.backward(loss)
        save()
        engine.step()
        if engine._core.micro_steps() % 3 == 1:
            save()
    engine.backward(engine(*next(loader)))
    engine.step()
    after = state_of(engine)
    for tag in ("forward", "backward", "step", "forward2", "backward2"):
        engine.load_checkpoint(folder, tag=tag)
        assert_same(state_of(engine), boundary)
    train(engine, loader, 1)
    assert_same(state_of(engine), after)  # a resume repeats what came since the boundary
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_a_save_within_an_accumulation_is_the_last_boundary_and_training_goes_on(stage, tmp_path):
    run_processes(2, save_within, stage, str(tmp_path))


def save_before_any_step(stage, folder):
    """The boundary is then what `initialize` left, and runs from there are one run."""
    deeptide.init_distributed()
    engine, loader = start(None, stage, gas=2)
    boundary = state_of(engine)
    loss = engine(*next(loader))
    engine.save_checkpoint(folder, tag="forward")
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(folder, tag="micro")
    engine.backward(engine(*next(loader)))
    engine.step()
    after = state_of(engine)
    for tag in ("forward", "micro"):
        engine.load_checkpoint(folder, tag=tag)
        assert_same(state_of(engine), boundary)
        train(engine, loader, 1)
        assert_same(state_of(engine), after)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_save_within_the_first_accumulation_is_the_start(stage, tmp_path):
    run_processes(2, save_before_any_step, stage, str(tmp_path))


def save_after_writes(folder):
    """Saves what a program does to buffers between steps."""
    deeptide.init_distributed()
    engine, loader = start(None, 2, kind=Normed)
    train(engine, loader, 1)
    with torch.no_grad():
        engine.module.batch_norm.running_mean.fill_(3.0)
        engine.module.large.fill_(4.0)
        engine.module(*next(loader))  # as torch.optim.swa_utils.update_bn does
    state = state_of(engine)
    engine.save_checkpoint(folder, tag="now")
    train(engine, loader, 1)
    engine.load_checkpoint(folder, tag="now")
    assert_same(state_of(engine), state)
    engine.destroy()


def test_a_save_between_steps_holds_what_the_program_has_written(tmp_path):
    run_processes(2, save_after_writes, str(tmp_path))


def save_in_handlers(stage, folder):
    """Errors of the program's, on all ranks, in forward, backward and between."""
    deeptide.init_distributed()
    engine, loader = start(None, stage, kind=Normed, gas=2)
    train(engine, loader, 1)
    boundary = state_of(engine)

    def fail_in_hook(_gradient):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def in_forward():
        engine(*next(loader), None)

    def in_backward():
        loss = engine(*next(loader))
        engine.module.batch_norm.weight.register_hook(fail_in_hook)
        engine.backward(loss)

    for number, attempt in enumerate((in_forward, in_backward)):
        try:
            attempt()
        except (TypeError, torch.OutOfMemoryError):
            engine.save_checkpoint(folder, tag=str(number))
        else:
            raise AssertionError("no error")
    for tag in ("0", "1"):
        engine.load_checkpoint(folder, tag=tag)
        assert_same(state_of(engine), boundary)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_save_in_an_exceptions_handler_is_the_last_boundary(stage, tmp_path):
    run_processes(2, save_in_handlers, stage, str(tmp_path))


# -- one rank alone ---------------------------------------------------------------------------------------------------


def fail_alone(folder):
    deeptide.init_distributed()
    engine, loader = start(None, 1, deeptide={"error_grace": 1, "comm_timeout": 60})
    train(engine, loader, 1)
    engine.save_checkpoint(folder, tag="last")
    boundary = weights_of(engine)
    begin = time.monotonic()
    try:
        if engine.world.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        with pytest.raises(deeptide.CommError, match=r"rank 1 handles an exception and calls save_checkpoint"):
            train(engine, loader, 1)
    except torch.OutOfMemoryError:
        with pytest.raises(deeptide.CommError, match=r"Nothing was saved.*last checkpoint is as it was.*on_preempt"):
            engine.save_checkpoint(folder, tag="lost")
    assert time.monotonic() - begin < 30
    torch.save(boundary, f"{folder}/boundary{engine.world.rank}")


def test_a_save_of_one_rank_alone_ends_in_an_error_and_leaves_the_last_checkpoint(tmp_path):
    run_processes(2, fail_alone, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "last"
    assert not (tmp_path / "lost").exists()
    boundary = torch.load(tmp_path / "boundary0")
    engine, _ = start(None, 1)
    engine.load_checkpoint(tmp_path)
    assert_same(weights_of(engine), boundary)


# -- interrupts at random moments -------------------------------------------------------------------------------------


class Slow(Normed):
    """Takes a while in Python, in autograd's threads and in waits of stage 3, so that interrupts meet all of them."""

    def forward(self, tokens, targets):
        time.sleep(0.002)
        return super().forward(tokens, targets)


def processes_of_all(folder, world):
    """The ranks' process ids."""
    mine = os.path.join(folder, f"pid{world.rank}")
    with open(mine + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(mine + ".new", mine)
    paths = [os.path.join(folder, f"pid{rank}") for rank in range(world.size)]
    while not all(map(os.path.exists, paths)):
        time.sleep(0.01)
    return [int(pathlib.Path(path).read_text()) for path in paths]


def begin_anew(stage):
    """After one step: what a program seeds after `initialize` is in no boundary before, nor is a large buffer."""
    engine, loader = start(None, stage, kind=Slow, gas=2)
    torch.manual_seed(engine.world.rank)
    train(engine, loader, 1)
    return engine, loader


def interrupted(stage, seed, folder):
    """Interrupts come to all ranks at once, wherever they are; each save is loaded, and training goes on from there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have left it ignored
    deeptide.init_distributed()
    engine, loader = begin_anew(stage)
    pids = processes_of_all(folder, engine.world)
    draws = random.Random(seed)
    steps = set()
    for number in range(6):
        delay, trained = draws.uniform(0, 0.1), threading.Event()
        ready = [pathlib.Path(folder, f"ready{number}.{rank}") for rank in range(engine.world.size)]
        if engine.world.rank == 0:

            def interrupt(number=number, delay=delay, trained=trained, ready=ready):
                while not all(path.exists() for path in ready):
                    time.sleep(0.001)
                if number % 2:
                    trained.wait()  # so that a busy machine comes on, too
                time.sleep(delay)
                for pid in reversed(pids):  # itself last: its main thread may keep this one waiting then
                    os.kill(pid, signal.SIGINT)

        try:
            if engine.world.rank == 0:
                threading.Thread(target=interrupt).start()
            ready[engine.world.rank].touch()  # from here on an interrupt is caught
            while True:
                engine.backward(engine(*next(loader)))
                if engine.step().applied:
                    trained.set()
        except KeyboardInterrupt:
            engine.save_checkpoint(folder, tag=str(number))
        engine.load_checkpoint(folder, tag=str(number))
        steps.add(engine.global_steps)
    assert len(steps) > 2
    resumed = state_of(engine)
    engine.destroy()
    engine, loader = begin_anew(stage)
    train(engine, loader, max(steps) - 1)
    assert_same(state_of(engine), resumed)
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_interrupts_at_random_moments_leave_the_last_boundary(stage, tmp_path):
    run_processes(2, interrupted, stage, 7 + stage, str(tmp_path), timeout=120)
