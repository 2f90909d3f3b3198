# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""An error of one stage reaches the others by name, also where its program catches it, or its process ends."""

import time

import models
import pytest
import torch
from conftest import run_processes

import deeptide
from deeptide.pipeline import PipelineModule

WIDTH, GAS, TIMEOUT = 8, 2, 600


class Breaks(torch.nn.Module):
    broken = None  # the number of the layer that raises

    def __init__(self, number):
        super().__init__()
        self.linear, self.number = torch.nn.Linear(WIDTH, WIDTH), number

    def forward(self, x):
        if self.broken == self.number:
            raise ValueError(f"layer {self.number} is broken")
        return torch.tanh(self.linear(x))


def loss_of(outputs, labels):
    return (outputs - labels).square().mean()


def start():
    """(engine, a function that runs one step)."""
    settings = models.config(0, gas=GAS, micro=2, deeptide={"error_grace": 0.5, "comm_timeout": TIMEOUT})
    model = PipelineModule([Breaks(0), Breaks(1)], num_stages=2, loss_fn=loss_of)
    engine = deeptide.initialize(model=model, config=settings)[0]

    def step():
        x = torch.ones(2, WIDTH)
        engine.train_batch(iter([(x, x)] * GAS))

    return engine, step


def catches(who, folder):
    """The stage `who` catches its error and goes on; prints what the other one hears, and how soon."""
    engine, step = start()
    step()
    Breaks.broken = who
    begin = time.monotonic()
    if engine.stage_id == who:
        with pytest.raises(ValueError, match=f"layer {who} is broken"):
            step()
        Breaks.broken = None
        with pytest.raises(deeptide.CommError):
            engine.save_checkpoint(folder) if folder else step()
        return
    with pytest.raises(deeptide.CommError) as error:
        step()
    print(time.monotonic() - begin, error.value)


@pytest.mark.parametrize(("who", "saves"), [(0, False), (1, True)])
def test_the_others_hear_of_an_error_that_a_stage_catches(who, saves, tmp_path):
    done = run_processes(2, catches, who, str(tmp_path) if saves else "")
    seconds, _, text = done[1 - who].stdout.partition(" ")
    assert f"raised ValueError in train_batch: layer {who} is broken" in text
    assert float(seconds) < TIMEOUT / 4


def ends(who):
    """The stage `who` ends by its error while the other one is busy."""
    engine, step = start()
    step()
    Breaks.broken = who
    if engine.stage_id != who:
        time.sleep(2)
    step()


@pytest.mark.parametrize("who", [0, 1])
def test_a_stage_that_was_busy_reads_why_another_process_ended(who):
    done = run_processes(2, ends, who, check=False)
    assert [process.returncode for process in done] == [1, 1]
    assert f"raised ValueError in train_batch: layer {who} is broken" in done[1 - who].stderr.splitlines()[-1]


# -- the program's own loop -------------------------------------------------------------------------------------------

RATE = 0.1


def batch_of(number):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))


def layers():
    torch.manual_seed(3)
    return torch.nn.Sequential(Breaks(0), Breaks(1))


def start_loop():
    settings = models.config(0, micro=2, gradient_clipping=0.0, parallel={"pipeline": 2})
    settings |= {"optimizer": {"type": "SGD", "params": {"lr": RATE}}}
    settings["deeptide"] |= {"error_grace": 0.5, "comm_timeout": TIMEOUT}
    return deeptide.initialize(model=layers(), config=settings)[0]


def train_on(engine, number):
    """Without an engine, the loss."""
    loss = engine(batch_of(number)).square().mean()
    engine.backward(loss)
    engine.step()


BROKEN = (0, 3)  # the first forward, and one that stages know already


def leaves_out(who):
    """All stages leave out batches that one of them cannot compute."""
    engine = start_loop()
    for number in range(5):
        Breaks.broken = who if number in BROKEN else None
        try:
            train_on(engine, number)
        except ValueError as error:
            assert number in BROKEN and f"layer {who} is broken" in str(error)
            assert engine.stage_id == who or f"rank {who}, stage {who} of 2, raised ValueError" in str(error)
            continue
        assert number not in BROKEN
    Breaks.broken = None
    plain = layers()
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    for number in set(range(5)) - set(BROKEN):
        optimizer.zero_grad()
        plain(batch_of(number)).square().mean().backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        if name.startswith(f"{engine.stage_id}."):
            torch.testing.assert_close(engine._core.full_state(name, "master"), value)
    engine.destroy()


@pytest.mark.parametrize("who", [0, 1])
def test_all_stages_leave_out_a_batch_that_one_cannot_compute(who):
    run_processes(2, leaves_out, who)


def goes_on_alone(who):
    """The other stage does not catch what it hears."""
    engine = start_loop()
    train_on(engine, 0)
    Breaks.broken = who
    if engine.stage_id != who:
        train_on(engine, 1)
        raise AssertionError("no error")
    with pytest.raises(ValueError, match=f"layer {who} is broken"):
        train_on(engine, 1)
    Breaks.broken = None
    with pytest.raises(deeptide.CommError, match=f"rank {1 - who} .*raised ValueError in forward"):
        train_on(engine, 2)


@pytest.mark.parametrize("who", [0, 1])
def test_a_stage_that_goes_on_alone_hears_that_the_other_has_ended(who):
    done = run_processes(2, goes_on_alone, who, check=False)
    assert f"rank {who}, stage {who} of 2, raised ValueError in its part of the forward" in done[1 - who].stderr
    assert "AssertionError" not in done[who].stderr + done[1 - who].stderr


def leaves_backward_out():
    """The first stage begins another forward where the last one steps."""
    engine = start_loop()
    train_on(engine, 0)
    with pytest.raises(deeptide.CommError, match=r"stage [01] has come to (step|pipeline), .* instead"):
        loss = engine(batch_of(1)).square().mean()
        engine.backward(loss)
        if engine.stage_id == 1:
            engine.step()
        else:
            engine(batch_of(2))


def test_stages_whose_calls_differ_are_told_of_each_other():
    run_processes(2, leaves_backward_out)
