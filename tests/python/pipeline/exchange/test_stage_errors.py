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
