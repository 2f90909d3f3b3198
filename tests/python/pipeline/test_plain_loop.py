# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A program's own loop, engine(batch), engine.backward(loss), engine.step(), trains a model that is cut into stages."""

import random
import re
import time

import families
import models
import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide.pipeline.errors import PipelineError
from deeptide.pipeline.step import plain_loop

STEPS, GAS = 3, 3


def start(world, name, stage=0, num_stages=2, gas=GAS, **more):
    settings = families.config(stage, gas, num_stages, deeptide={"error_grace": 0.2}, **more)
    engine = deeptide.initialize(model=families.make(name), config=settings, world=world)[0]
    return engine, families.batches(name, engine.data_parallel_rank, engine.data_parallel_size, 9, gas)


def call(engine, batch):
    """(output, loss)."""
    if isinstance(batch, dict):
        output = engine(**batch)
        return output, output["loss"] if isinstance(output, dict) else output.loss
    output = engine(*batch) if isinstance(batch, tuple) else engine(batch)
    return output, output


def by_hand(world, name, stage, num_stages, gas, more):
    engine, given = start(world, name, stage, num_stages, gas, **more)
    losses, norms = [], []
    for _ in range(STEPS):
        own = []
        for _ in range(gas):
            _, loss = call(engine, next(given))
            told = engine.backward(loss)
            assert told.item() == pytest.approx(loss.item() / gas, rel=1e-2)
            applied = engine.step()
            own.append(loss.item())
        assert applied
        losses.append(sum(own) / gas)
        norms.append(engine.get_global_grad_norm())
    return losses, norms, families.states_of(engine)


def compare(name, stage=0, num_stages=2, data_size=1, gas=GAS, exact=True, **more):
    ranks = num_stages * data_size
    loop = run_ranks(ranks, by_hand, name, stage, num_stages, gas, more)
    whole = run_ranks(ranks, families.train, name, families.config(stage, gas, num_stages, **more), gas, STEPS, None)
    data = range(data_size)
    for rank, (losses, norms, states) in enumerate(loop):
        assert losses == loop[rank % data_size][0]  # every rank of a pipeline has the loss
        assert norms == whole[rank][1] and states.keys() == whole[rank][2].keys()
        assert all(torch.equal(value, whole[rank][2][key]) for key, value in states.items())
    for step in range(STEPS):
        assert sum(loop[rank][0][step] for rank in data) / data_size == pytest.approx(whole[0][0][step], rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen3", "vit", "plain", "sequential"])
def test_a_loop_computes_what_train_batch_does_bit_for_bit(name):
    compare(name, num_stages=4 if name in ("llama", "plain") else 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("gas", [1, GAS])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.costly
def test_a_loop_goes_with_every_stage_of_zero_and_accumulation(name, stage, gas, bf16):
    compare(name, stage, 2, 2, gas, bf16=bf16)


def test_fp16_scales_the_loss_of_the_last_stage_alone():
    compare("llama", 2, fp16={"enabled": True, "initial_scale_power": 8})


def stumbles(world, seed):
    """Ranks of one stage that are behind those that have ended it, for moments that differ by rank and operator."""
    engine, given = start(world, "gpt2", stage=3, gas=2, parallel={"tensor": 2})
    draws = random.Random(100 * seed + world.rank)

    def stop_now_and_then(*_):
        time.sleep(0.03 * draws.random() if draws.random() < 0.3 else 0.0)

    for module in engine.module.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(stop_now_and_then)
            module.register_forward_hook(stop_now_and_then)
    losses = []
    for _ in range(4):
        _, loss = call(engine, next(given))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(2))
def test_ranks_of_a_stage_that_are_behind_hold_up_nobody_for_ever(seed):
    """The teams of two ranks that share layers have one loss each, equal on both stages."""
    losses = run_ranks(8, stumbles, seed)
    assert all(losses[rank] == losses[rank % 4 // 2 * 2] for rank in range(8))
    assert losses[0] != losses[2]


def say(world):
    engine, given = start(world, "llama")
    said = []
    engine_said, plain = engine._say_once, plain_loop.ADVICE
    engine._say_once = lambda text, level="info": (said.append((text, level)), engine_said(text, level))
    for _ in range(2):
        output, loss = call(engine, next(given))
        engine.backward(loss)
        engine.step()
    assert said == [(plain, "warning")] * 2 and plain in engine._said
    return loss.item(), type(output).__name__


def test_the_engine_says_that_stages_wait(caplog):
    results = run_ranks(2, say)
    assert results[0][0] == results[1][0] and [kind for _, kind in results] == ["StageOutput", "CausalLMOutputWithPast"]
    assert [record.message for record in caplog.records].count(plain_loop.ADVICE) == 1


def evaluates_between(world, name, looks):
    """A look at other data between the micro-batches of a step changes nothing."""
    engine, given = start(world, name)
    others = list(families.batches(name, 0, 1, 1, GAS))
    seen = []
    for number in range(2 * GAS):
        _, loss = call(engine, next(given))
        engine.backward(loss)
        if looks and number % GAS < 2:
            with torch.no_grad():
                seen.append(call(engine, others[0])[1].item())
            seen.append(engine.eval_batch(iter(others)).item())
        engine.step()
    return families.states_of(engine), seen, [engine.train_batch(given).item() for _ in range(2)]


@pytest.mark.costly
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_evaluations_between_micro_batches_change_nothing(name):
    looked, plain = run_ranks(2, evaluates_between, name, True), run_ranks(2, evaluates_between, name, False)
    assert looked[0][1] == looked[1][1] and len(looked[0][1]) == 8
    assert looked[0][1][0] == looked[0][1][2] != looked[0][1][4]  # within a step weights are what they were
    for with_looks, without in zip(looked, plain, strict=True):
        assert with_looks[2] == without[2]
        assert all(torch.equal(value, without[0][key]) for key, value in with_looks[0].items())


def backward_of_two(world, name, together):
    """One backward of the sum of two losses, beside one of each; the boundary is set after the backward."""
    engine, given = start(world, name, gas=1)
    engine.set_gradient_accumulation_boundary(False)
    for _ in range(2):
        losses = []
        for _ in range(2):
            losses.append(call(engine, next(given))[1])
            if not together:
                engine.backward(losses[-1])
        if together:
            engine.backward(losses[0] + losses[1])
        engine.set_gradient_accumulation_boundary(True)
        assert engine.step()
        engine.set_gradient_accumulation_boundary(False)
    return engine.get_global_grad_norm(), families.states_of(engine)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_backward_takes_all_forwards_since_the_last_one(name):
    one, two = run_ranks(2, backward_of_two, name, True), run_ranks(2, backward_of_two, name, False)
    for (norm, states), (other_norm, others) in zip(one, two, strict=True):
        assert norm == pytest.approx(other_norm, rel=1e-5) and norm > 0
        for key, value in states.items():
            torch.testing.assert_close(value, others[key], rtol=1e-3, atol=1e-5, msg=key)


def drop(world, drops):
    """zero_grad() drops gradients of tied weights that wait for their owner too."""
    engine, given = start(world, "gpt2", gas=2)
    batches = [next(given) for _ in range(3)]
    for _ in range(2):
        if drops:
            engine.backward(call(engine, batches[0])[1])
            engine.zero_grad()
        for batch in batches[1:]:
            engine.backward(call(engine, batch)[1])
            engine.step()
    assert engine.global_steps == 2
    return engine.get_global_grad_norm(), families.states_of(engine)


def test_a_dropped_gradient_is_dropped_on_all_stages():
    dropped, plain = run_ranks(2, drop, True), run_ranks(2, drop, False)
    for (norm, states), (other, others) in zip(dropped, plain, strict=True):
        assert norm == other and all(torch.equal(value, others[key]) for key, value in states.items())


class Logits(torch.nn.Module):
    """A model whose program computes the loss."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(families.VOCABULARY, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.head = torch.nn.Linear(8, families.VOCABULARY)

    def forward(self, tokens, pair=False):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        logits = self.head(hidden)
        return (logits.square().mean(), logits) if pair else logits


def own_loss(world, num_stages):
    with families._seeding:
        torch.manual_seed(1)
        model = Logits()
    engine = deeptide.initialize(model=model, config=families.config(1, 1, num_stages), world=world)[0]
    for seed in range(3):
        tokens = torch.randint(0, families.VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(seed))
        logits = engine(tokens)
        assert logits.shape == (2, 5, families.VOCABULARY)
        engine.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten()))
        engine.step()
    loss, logits = engine(tokens, pair=True)
    if num_stages and not engine.is_last_stage():
        with pytest.raises(AttributeError, match="'shape' is on the last stage of the pipeline alone"):
            logits.shape.numel()
    return loss.item(), engine.get_global_grad_norm()


def test_a_program_may_compute_the_loss_itself():
    whole = run_ranks(1, own_loss, 0)[0]
    assert run_ranks(2, own_loss, 2) == [pytest.approx(whole), pytest.approx(whole)]


def misuse(world):
    engine, given = start(world, "llama")
    with pytest.raises(ValueError, match=r"step\(\) before backward\(\): no rank has a gradient"):
        engine.step()
    output, loss = call(engine, next(given))
    with pytest.raises(PipelineError, match="retain_graph does not go with a pipeline"):
        engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    with pytest.raises(PipelineError, match="there was no forward with gradients since the last backward"):
        engine.backward(loss)
    if world.rank == 0:
        with pytest.raises(KeyError, match="'logits' is on the last stage"):
            output["logits"]
        with pytest.raises(PipelineError, match=r"call engine\.backward\(loss\)"):
            loss.backward()
        assert output[0] is output.loss and not hasattr(output, "logits")
    engine.step()
    other = families.batches("llama", world.rank, 2, 1, GAS)
    with pytest.raises(ValueError, match="the micro-batches of stages 0 and 1 differ"):
        engine(**next(other))
    for method in (engine.join, engine.rebuild):
        with pytest.raises(PipelineError, match=re.escape(f"{method.__name__}: ")):
            method()
    _, loss = call(engine, next(given))
    engine.backward(loss)


def test_what_a_loop_cannot_is_said():
    run_ranks(2, misuse)


def not_finite(world, bad_stage):
    engine, given = start(world, "llama", 2, gas=2)
    name, parameter = next((n, p) for n, p in engine.module.named_parameters() if "down_proj" in n)
    is_bad = engine.stage_id == bad_stage and engine.data_parallel_rank == 1
    hook = parameter.register_hook(lambda gradient: gradient * float("nan")) if is_bad else None
    before = families.states_of(engine)
    for _ in range(2):
        engine.backward(call(engine, next(given))[1])
        outcome = engine.step()
    assert not outcome and engine.skipped_steps == 1
    assert all(torch.equal(value, before[key]) for key, value in families.states_of(engine).items())
    if hook is not None:
        hook.remove()
    assert engine.train_batch(given).isfinite() and engine.was_step_applied()
    return name, outcome.parameter, outcome.rank


@pytest.mark.parametrize("bad_stage", [0, 1])
def test_all_stages_skip_and_name_layer_and_rank(bad_stage):
    results = run_ranks(4, not_finite, bad_stage)
    assert {result[1:] for result in results} == {(results[2 * bad_stage][0], 2 * bad_stage + 1)}


def tells_the_boundary(world, num_stages, late):
    """Steps of two micro-batches of a tied weight. late: the program says after a backward whether it is the last."""
    gas, micro = 2, 2
    settings = models.config(0, gas=gas, micro=micro)
    settings = {**settings, "parallel": {"pipeline": num_stages}} if num_stages > 1 else settings
    engine = deeptide.initialize(model=models.make_model(), config=settings, world=world)[0]
    draws = torch.Generator().manual_seed(3)
    for number in range(2 * gas):
        tokens = torch.randint(0, 37, (micro, 5), generator=draws)
        if late:
            engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(tokens, tokens.roll(1, 1)))
        if late:
            engine.set_gradient_accumulation_boundary(number % gas == gas - 1)
        engine.step()
    return engine.get_global_grad_norm(), families.states_of(engine)


@pytest.mark.parametrize("late", [False, True])
def test_a_tied_weight_gets_all_its_gradients_if_the_boundary_is_told_after_backward(late):
    norm, states = run_ranks(1, tells_the_boundary, 1, False)[0]
    for cut_norm, cut_states in run_ranks(2, tells_the_boundary, 2, late):
        assert cut_norm == pytest.approx(norm, rel=1e-5)
        for key, value in cut_states.items():
            torch.testing.assert_close(value, states[key], rtol=1e-3, atol=1e-6, msg=key)
