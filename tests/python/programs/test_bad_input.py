# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Bad input gets a clear error, on every rank, and changes nothing."""

import models
import pytest
import torch
from conftest import run_ranks
from states import assert_same, loss_of, snapshot, start, train
from torch import nn

import deeptide

STAGES = [0, 1, 2, 3]
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 10}}


# -- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"train_batch_size": 4,\n "zero_optimization": {"stage": 2,\n }',
            "bad.json:3:2: malformed JSON: unexpected end",
        ),
        ('{"train_batch_size": 4, "zero_optimisation": {}}', "zero_optimization"),
        ('{"train_batch_size": 4, "train_batch_size": 8}', "train_batch_size"),
        ('{"train_batch_size": "four"}', "train_batch_size"),
        ("", "bad.json"),
        (
            '{"train_batch_size": 5, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}',
            "5 != 2 . 2 . 1",
        ),
    ],
)
def test_a_bad_configuration_is_refused(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    model = models.make_model()
    before = [(p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    with pytest.raises(deeptide.ConfigError, match=message):
        deeptide.initialize(model=model, config=str(path))
    for p, (address, value) in zip(model.parameters(), before, strict=True):
        assert p.data_ptr() == address and torch.equal(p, value)


def test_an_unreadable_configuration_is_refused(tmp_path):
    with pytest.raises(deeptide.ConfigError, match="there is no such file"):
        deeptide.initialize(model=models.make_model(), config=str(tmp_path / "none.json"))
    with pytest.raises(deeptide.ConfigError, match=str(tmp_path)):
        deeptide.initialize(model=models.make_model(), config=str(tmp_path))


# -- models -----------------------------------------------------------------------------------------------------------


class Overlapping(nn.Module):
    def __init__(self):
        super().__init__()
        memory = torch.ones(10)
        self.one, self.other = nn.Parameter(memory[:6]), nn.Parameter(memory[4:])


def frozen():
    return models.make_model().requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (frozen, "no trainable parameter is left"),
        (Overlapping, "'one' and 'other' overlap in memory"),
        (nn.Identity, "no trainable parameter is left to optimize: the model has none"),
        (lambda: models.make_model().half(), "fp16 with loss scaling"),
        (lambda: models.make_model().to("meta"), "on the meta device and has no values"),
    ],
    ids=["frozen", "overlapping", "empty", "half", "meta"],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_bad_model_is_refused(stage, make, message):
    model = make()
    before = [(id(p), p.data_ptr(), p.dtype) for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        start(stage=stage, model=model)
    assert before == [(id(p), p.data_ptr(), p.dtype) for p in model.parameters()]


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_has_one_engine(stage):
    def run(world):
        engine = start(world, stage)
        with pytest.raises(ValueError, match="belongs to another engine"):
            start(world, stage, engine.module)
        assert train(engine)
        engine.destroy()
        if stage < 3:  # its weights are whole again
            assert train(start(world, stage, engine.module))

    run_ranks(2, run)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_moved_is_named(stage):
    def run(world):
        engine = start(world, stage)
        train(engine)
        before = snapshot(engine)
        parameter = engine.module.h[1].up.bias
        storage = parameter.data
        engine.backward(loss_of(engine))
        parameter.data = torch.zeros_like(parameter)
        with pytest.raises(ValueError, match=r"'h.1.up.bias' got other memory after initialize"):
            engine.step()
        parameter.data = storage
        assert_same(before, snapshot(engine))

    run_ranks(2, run)


def test_a_rank_whose_model_is_refused_ends_the_others():
    def run(world):
        model = models.make_model()
        if world.rank == 1:
            flat = torch.zeros(30)
            model.norm.weight.data, model.norm.bias.data = flat[:20], flat[10:]
        with pytest.raises((deeptide.CommError, ValueError)) as error:
            start(world, 2, model)
        return str(error.value)

    other, refused = run_ranks(2, run, timeout=30)
    assert "overlap in memory" in refused
    assert "rank 1 failed in initialize" in other


# -- losses and steps -------------------------------------------------------------------------------------------------


def no_loss(engine):
    return engine(models.batches(1, 2)[0][0])


def detached(engine):
    return loss_of(engine).detach()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.backward(no_loss(e)), "must be a scalar, got shape .2, 6, 37."),
        (lambda e: e.backward(detached(e)), "does not require grad"),
        (lambda e: e.step(), "before backward"),
        (lambda e: e.load_checkpoint("/nowhere", tag="../x"), "'../x'"),
        (lambda e: e.save_checkpoint("/nowhere", tag="a/b"), "'a/b'"),
    ],
    ids=["matrix", "detached", "step", "load", "save"],
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_bad_call_changes_nothing(stage, call, message):
    def run(world):
        engine, other = start(world, stage), start(world, stage)
        train(engine), train(other)
        before = snapshot(engine)
        with pytest.raises((ValueError, deeptide.CheckpointError), match=message):
            call(engine)
        assert_same(before, snapshot(engine))
        train(engine, 1, 2), train(other, 1, 2)
        assert_same(snapshot(engine), snapshot(other))

    run_ranks(2, run)


def test_a_step_without_gradients_within_an_accumulation_is_the_same_at_all_stages():
    def run(world, stage):
        engine = start(world, stage, gas=2)
        engine.backward(loss_of(engine))
        engine.step()
        return bool(engine.step()), engine.global_steps

    for stage in STAGES:
        assert run_ranks(2, run, stage) == [(True, 1)] * 2


# -- non-finite gradients ---------------------------------------------------------------------------------------------


def poison(engine, name, value):
    def once(gradient):
        handle.remove()
        gradient = gradient.clone()
        gradient.view(-1)[-1] = value
        return gradient

    handle = dict(engine.module.named_parameters())[name].register_hook(once)


def train_with_a_bad_step(world, stage, gas, bad_rank, name, value):
    engine, other = (start(world, stage, gas=gas, scheduler=SCHEDULE) for _ in range(2))
    train(engine, 0, gas), train(other, 0, gas)
    before = snapshot(engine)
    if world.rank == bad_rank:
        poison(engine, name, value)
    outcome = train(engine, gas, 2 * gas)
    assert not outcome.applied and outcome.reason == "non-finite gradient"
    assert (outcome.parameter, outcome.rank) == (name, bad_rank)
    weights, counters = snapshot(engine)
    assert_same((weights, before[1]), before)
    assert counters == (2, 1, 2 * gas, before[1][3])
    assert train(engine, 2 * gas, 3 * gas).lr == train(other, 2 * gas, 3 * gas).lr
    after, expected = snapshot(engine), snapshot(other)
    assert_same((after[0], after[1][3]), (expected[0], expected[1][3]))


@pytest.mark.parametrize(("name", "value"), [("embed.weight", float("nan")), ("h.1.down.bias", float("inf"))])
@pytest.mark.parametrize(("world", "gas", "bad_rank"), [(1, 1, 0), (2, 1, 1), (3, 1, 0), (3, 2, 2)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_non_finite_gradient_on_one_rank_skips_the_step_everywhere(stage, world, gas, bad_rank, name, value):
    run_ranks(world, train_with_a_bad_step, stage, gas, bad_rank, name, value)
