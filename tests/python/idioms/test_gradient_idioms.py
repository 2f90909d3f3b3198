# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Torch's idioms for gradients beside an engine train as in plain torch, or are an error that names the cure."""

import copy
import os

import edges
import models
import pytest
import torch
from conftest import run_ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import deeptide
from deeptide import ConfigError

pytestmark = pytest.mark.both_ways

RATE = 0.1
STAGES = [0, 1, 2, 3]


def start(world, stage, gas=1, **extra):
    config = models.config(stage, gas=gas, gradient_clipping=0.0, **extra)
    config["optimizer"] = {"type": "SGD", "params": {"lr": RATE}}
    model = models.make_model(kind=edges.Net)
    return deeptide.initialize(model=model, config=config, world=world)[0]


def loss_of(model, rank, step, of=1.0):
    return of * model(edges.inputs(rank, step)).square().mean()


def plain_after(change, ranks=2, steps=3):
    """The parameters of plain torch, whose gradient is the mean over ranks; change(model) before each last backward."""
    model = models.make_model(kind=edges.Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(steps):
        for rank in range(ranks):
            (loss_of(model, rank, 10 * step, 5.0) / ranks).backward()
        change(model)
        for rank in range(ranks):
            (loss_of(model, rank, 10 * step + 9) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def engine_after(world, stage, change, steps=3, gas=1, own=False):
    """The same with an engine; gas - 1 micro-batches of it are stepped before `change`."""
    engine = start(world, stage, gas + (gas > 1))
    for step in range(steps):
        for micro in range(gas):
            (engine.backward if own else torch.Tensor.backward)(
                loss_of(engine.module, world.rank, 10 * step + micro, 5.0)
            )
            if gas > 1:
                engine.step()
        change(engine.module)
        engine.backward(loss_of(engine.module, world.rank, 10 * step + 9))
        engine.step()
    return {name: engine._core.full_state(name, "master") for name, _ in engine.module.named_parameters()}


def assert_alike(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def final_parameters(engine):
    """Values that ranks have alike: the buffer "mean" is of each rank's own inputs. Collective."""
    state = edges.final_state(engine)
    del state["mean"]
    return state


def zero(model):
    model.zero_grad()


def zero_parent(model):
    nn.ModuleDict({"generator": nn.Linear(2, 2), "critic": model}).zero_grad()


def zero_part(model):
    model.second.zero_grad()


def set_none(model):
    for parameter in model.parameters():
        parameter.grad = None


def set_none_of_part(model):
    del model.head.weight.grad
    model.second.bias.grad = None


def zero_by_optimizer(model):
    torch.optim.Adam(model.parameters()).zero_grad()


CHANGES = [zero, zero_parent, zero_part, set_none, set_none_of_part, zero_by_optimizer]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_dropped_between_backwards_is_dropped_as_in_torch(stage, change, own):
    expected = plain_after(change)
    for found in run_ranks(2, engine_after, stage, change, 3, 1, own):
        assert_alike(found, expected)


@pytest.mark.parametrize("change", [zero, zero_part, set_none_of_part])
@pytest.mark.parametrize("stage", STAGES)
def test_it_is_dropped_within_an_accumulation(stage, change):
    expected = plain_after_one(change)
    for found in run_ranks(2, engine_after, stage, change, 1, 2):
        assert_alike(found, expected)


def plain_after_one(change):
    """One step of three micro-batches on two ranks, two of them before `change`."""
    model = models.make_model(kind=edges.Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for micro in range(2):
        for rank in range(2):
            (loss_of(model, rank, micro, 5.0) / 6).backward()
    change(model)
    for rank in range(2):
        (loss_of(model, rank, 9) / 6).backward()
    optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_zero_grad_right_after_a_step_waits_for_nobody():
    def program(world):
        engine = start(world, 2)
        edges.train(engine, 1, rank=world.rank)
        if world.rank == 0:
            for _ in range(3):
                engine.module.zero_grad()  # there is none: no rank has to hear of it
        edges.train(engine, 1, first=1, rank=world.rank)
        return final_parameters(engine)

    first, second = run_ranks(2, program)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


class Asked:
    """An engine's core that notes what it is asked."""

    def __init__(self, core, asked):
        self._core, self._asked = core, asked

    def __getattr__(self, name):
        self._asked.append(name)
        return getattr(self._core, name)


def test_zero_grad_asks_no_engine_of_other_parameters(monkeypatch):
    """Another rank's, in another thread, may be within a backward that waits for this thread."""
    engine, other = start(None, 0), start(None, 0)
    asked = []
    monkeypatch.setattr(other, "_core", Asked(other._core, asked))
    loss_of(engine.module, 0, 0).backward()
    engine.module.zero_grad()
    torch.optim.SGD(engine.module.parameters(), lr=RATE).zero_grad()
    assert not asked
    other.module.zero_grad()
    assert asked


def test_a_rank_that_drops_alone_is_named():
    def program(world):
        engine = start(world, 0)
        loss_of(engine.module, world.rank, 0).backward()
        with pytest.raises(deeptide.CommError, match=r"zero_grad\(\)"):
            if world.rank == 0:
                engine.module.zero_grad()
            engine.step()

    run_ranks(2, program)


def test_ranks_that_drop_other_parameters_are_named():
    def program(world):
        engine = start(world, 2)
        loss_of(engine.module, world.rank, 0).backward()
        with pytest.raises(ValueError, match="drop the same on every rank"):
            (engine.module.first if world.rank == 0 else engine.module.second).zero_grad()

    run_ranks(2, program)


# -- p.grad and clipping ------------------------------------------------------------------------------------------


def clip_norm(model):
    return clip_grad_norm_(model.parameters(), 0.05)


def clip_value(model):
    clip_grad_value_(model.parameters(), 0.01)


def clip_by_hand(model):
    total = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).sqrt()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.05 / total)
    return total


def unscale(model):
    """Half of each gradient, by torch's GradScaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(1))
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=RATE))


def look(model):
    return [p.grad.clone() for p in model.parameters()]


READERS = [clip_norm, clip_value, clip_by_hand, unscale, look]


def steps_of(model, backward, step, change, rank, ranks, gas):
    seen = []
    for number in range(3):
        for micro in range(gas):
            for each in [rank] if rank is not None else range(ranks):
                backward(loss_of(model, each, 10 * number + micro, 3.0))
            if micro + 1 < gas:
                step()
        seen.append(change(model))
        step()
    return seen


def plain_reading(change, gas=1, ranks=2):
    model = models.make_model(kind=edges.Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    calls = iter(range(100))

    def step():
        if next(calls) % gas == gas - 1:
            optimizer.step()
            optimizer.zero_grad()

    seen = steps_of(model, lambda loss: (loss / ranks / gas).backward(), step, change, None, ranks, gas)
    return seen, {name: p.detach().clone() for name, p in model.named_parameters()}


def engine_reading(world, stage, change, gas=1, own=True):
    engine = start(world, stage, gas)
    backward = engine.backward if own else torch.Tensor.backward
    seen = steps_of(engine.module, backward, engine.step, change, world.rank, 1, gas)
    return seen, {name: engine._core.full_state(name, "master") for name, _ in engine.module.named_parameters()}


@pytest.mark.parametrize("gas", [1, 2])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("change", READERS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_reads_grad_sees_and_changes_the_whole_gradient(stage, change, own, gas):
    seen, weights = plain_reading(change, gas)
    for found, its_weights in run_ranks(2, engine_reading, stage, change, gas, own):
        torch.testing.assert_close(found, seen, rtol=1e-5, atol=1e-6)
        assert_alike(its_weights, weights)


@pytest.mark.parametrize("stage", [0, 2])
def test_reading_changes_no_bit(stage):
    read = run_ranks(2, engine_reading, stage, look)[0][1]
    unread = run_ranks(2, engine_reading, stage, lambda model: None)[0][1]
    assert all(torch.equal(value, unread[name]) for name, value in read.items())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_rank_may_look_alone(stage):
    def program(world):
        engine = start(world, stage)
        for step in range(3):
            engine.backward(loss_of(engine.module, world.rank, step))
            if world.rank == 1:
                assert engine.module.first.weight.grad.abs().sum() > 0
            engine.step()
        return final_parameters(engine)

    first, second = run_ranks(2, program)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("change", [clip_norm, clip_value, unscale])
def test_clipping_what_no_rank_has_whole_is_an_error(change):
    """Ranks that share memory shard no parameters at stage 3: they have whole gradients, and clip."""

    def program(world):
        engine = start(world, 3)
        engine.backward(loss_of(engine.module, world.rank, 0))
        with pytest.raises(ConfigError, match=r"gradient_clipping.*get_global_grad_norm|safe_get_full_grad"):
            change(engine.module)
        engine.step()

    if "DEEPTIDE_TEST_APART" in os.environ:
        run_ranks(2, program)
        return
    seen, weights = plain_reading(change)
    for found, its_weights in run_ranks(2, engine_reading, 3, change):
        torch.testing.assert_close(found, seen, rtol=1e-5, atol=1e-6)
        assert_alike(its_weights, weights)


def test_clipping_before_the_last_micro_batch_is_an_error():
    engine = start(None, 0, gas=2)
    engine.backward(loss_of(engine.module, 0, 0))
    with pytest.raises(ConfigError, match=r"clip_grad_norm_: .*is_gradient_accumulation_boundary"):
        clip_norm(engine.module)
    engine.step()
    engine.backward(loss_of(engine.module, 0, 1))
    assert clip_norm(engine.module) > 0
    engine.step()


def test_a_gradient_that_cannot_be_shown_is_none_with_one_warning():
    engine = start(None, 3)
    engine.backward(loss_of(engine.module, 0, 0))
    with pytest.warns(deeptide.DeeptideWarning, match="safe_get_full_grad") as found:
        assert all(p.grad is None for p in engine.module.parameters())
    assert len(found) == 1


def test_torchs_own_code_reads_no_gradient():
    engine = start(None, 0)
    engine.backward(loss_of(engine.module, 0, 0))
    assert copy.deepcopy(engine.module).first.weight.grad is None
    engine.module.to("cpu")
    assert engine._core.taken_gradient(engine.module.first.weight).name == "showable"
    engine.step()
    assert engine.module.first.weight.grad is None


# -- steps ----------------------------------------------------------------------------------------------------------


def test_a_foreign_optimizer_that_would_step_is_an_error():
    engine = start(None, 0)
    foreign = torch.optim.AdamW(engine.module.parameters())
    engine.backward(loss_of(engine.module, 0, 0))
    with pytest.raises(ConfigError, match=r"AdamW.step\(\): .*engine.step\(\)"):
        foreign.step()
    engine.step()
    with pytest.warns(deeptide.DeeptideWarning, match=r"AdamW.step\(\) has nothing to do"):
        foreign.step()


def test_a_foreign_optimizer_of_what_no_engine_trains_steps():
    engine = start(None, 0)
    other = nn.Linear(2, 2)
    foreign = torch.optim.SGD(other.parameters(), lr=1.0)
    engine.backward(loss_of(engine.module, 0, 0))
    other(torch.ones(1, 2)).sum().backward()
    before = other.weight.detach().clone()
    foreign.step()
    torch.testing.assert_close(other.weight.detach(), before - 1.0)
    assert engine.step().applied


@pytest.mark.parametrize("own", [False, True])
def test_many_backwards_without_a_step_are_warned_of_once(own, capfd):
    engine = start(None, 0)
    for number in range(60):
        loss = loss_of(engine.module, 0, number)
        engine.backward(loss) if own else loss.backward()
    text = capfd.readouterr().err
    assert text.count("backward passes since the last step()") == 1 and "engine.step()" in text
    engine.destroy()
    assert "not one step()" not in capfd.readouterr().err


@pytest.mark.parametrize(("backwards", "steps", "says"), [(10, 0, True), (10, 1, False), (2, 0, False)])
def test_an_end_without_a_step_is_warned_of(backwards, steps, says, capfd):
    engine = start(None, 0)
    for number in range(backwards):
        engine.backward(loss_of(engine.module, 0, number))
    for _ in range(steps):
        engine.step()
    engine.destroy()
    assert ("not one step()" in capfd.readouterr().err) == says


def test_accumulation_by_hand_is_not_warned_of_twice(capfd):
    engine = start(None, 0)
    for _ in range(3):
        for number in range(60):
            engine.backward(loss_of(engine.module, 0, number))
        engine.step()
    assert capfd.readouterr().err.count("backward passes since") == 1


@pytest.mark.parametrize("drops", [False, True])
def test_gradients_of_another_backward_are_told_of_once(drops, capfd):
    engine = start(None, 0)
    for number in range(3):
        loss_of(engine.module, 0, number).backward()
        if drops:
            engine.module.zero_grad()
        engine.backward(loss_of(engine.module, 0, number))
        engine.step()
    text = capfd.readouterr().err
    assert text.count("a backward pass that this engine did not begin") == (0 if drops else 1)
    assert drops or "'first.weight'" in text


def test_programs_that_call_autograd_themselves_are_not_told(capfd):
    engine = start(None, 0, gas=2)
    for number in range(4):
        loss_of(engine.module, 0, number).backward()
        engine.step()
    assert "did not begin" not in capfd.readouterr().err


def test_a_hook_in_a_forward_sees_the_gradient_of_the_loss_that_backward_was_given():
    seen = []
    engine = deeptide.initialize(model=edges.Net(), config=models.config(0, gas=4))[0]
    output = engine(edges.inputs())
    output.register_hook(seen.append)
    engine.backward(output.sum())
    torch.testing.assert_close(seen, [torch.ones_like(output)])
