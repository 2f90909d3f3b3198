# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Users handle parameters outside forward: copies, state dicts, loading, initialisation in place, lists of all."""

import copy

import models
import pytest
import torch
from conftest import run_ranks
from gated import assert_as_plain, engine_of, gradients_of, on_plain
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from deeptide import ConfigError

pytestmark = pytest.mark.apart

TOKENS, TARGETS = models.batches(1, 2)[0]


def weights_of(engine):
    """Whole values by name, through the engine's own path: it reads the shards."""
    return {name: engine._core.full_state(name, "master") for name, _ in engine.module.named_parameters()}


def assert_same_values(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def on_ranks(change, **settings):
    """Calls change(module) under the engine, trains one step after it; returns weights before and after, by rank."""

    def rank(world):
        with engine_of(world, models.TinyModel, **settings) as engine:
            result = change(engine.module)
            before = weights_of(engine)
            seen = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
            assert_same_values(seen, before)
            engine.module(TOKENS, TARGETS).backward()
            gradients = gradients_of(engine)
            assert engine.step().applied
            return result, before, gradients

    return run_ranks(2, rank)


def assert_changes_as_plain(change):
    """The same change to a plain model gives the same weights, and then the same gradients."""
    plain = models.make_model()
    change(plain)
    plain(TOKENS, TARGETS).backward()
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    for _, found, gradients in on_ranks(change):
        assert_same_values(found, expected)
        assert_same_values(gradients, {name: p.grad for name, p in plain.named_parameters()})


@torch.no_grad()
def init_all(model):
    for p in model.parameters():
        p.fill_(0.02)
    nn.init.constant_(model.h[1].up.weight, 0.01)
    nn.init.eye_(model.h[0].down.weight)


@torch.no_grad()
def write_through_views(model):
    model.h[0].up.weight[3:5, 2:] = 1.25
    model.h[1].up.weight.t()[0].mul_(2)
    model.h[2].down.bias.view(4, 5)[1].copy_(torch.arange(5.0))
    model.embed.weight.detach()[7] += 1
    model.norm.weight.data.clamp_(max=0.5)
    torch.add(model.norm.bias, 1, out=model.norm.bias)


@torch.no_grad()
def write_by_index(model):
    weight = model.h[0].up.weight
    weight[weight > 0.1] = 0.0
    weight.index_fill_(0, torch.tensor([1, 4]), 0.5)
    weight.masked_fill_(weight < -0.1, -0.1)
    model.embed.weight[torch.tensor([0, 5])] = torch.ones(2, 20)


@torch.no_grad()
def write_by_foreach(model):
    parameters = list(model.parameters())
    torch._foreach_mul_(parameters, 0.5)
    torch._foreach_add_(parameters, torch._foreach_abs(parameters), alpha=0.25)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parameters)))
    torch._foreach_div_(parameters, norm)


@pytest.mark.parametrize("change", [init_all, write_through_views, write_by_index, write_by_foreach])
def test_write_in_place_reaches_the_shards(change):
    assert_changes_as_plain(change)


def evaluate(model):
    with torch.no_grad():
        return model(TOKENS, TARGETS).item()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("live", [1, 10**6])
def test_ranks_that_evaluate_between_writes_see_them_in_their_own_order(live, ahead):
    """One rank evaluates before and between writes, so it holds other units, and the other is far ahead of it."""

    def program(model, evaluates):
        losses = []
        for factor in (0.5, 3.0, 0.25):
            losses += [evaluate(model)] if evaluates else []
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(factor)
                model.norm.weight.fill_(factor)
        return [*losses, evaluate(model)]

    def rank(world):
        with engine_of(world, models.TinyModel, zero={"stage3_max_live_parameters": live}) as engine:
            losses = program(engine.module, world.rank != ahead)
            return losses, evaluate(engine.module), weights_of(engine), evaluate(engine.module)

    plain = models.make_model()
    expected = program(plain, True)
    for found in run_ranks(2, rank):
        losses, now, weights, later = found
        assert losses in (expected, expected[-1:])
        assert now == later == expected[-1]
        assert_same_values(weights, {name: p.detach() for name, p in plain.named_parameters()})


def test_init_draws_the_same_on_ranks_as_on_a_plain_model():
    """Each rank draws for itself, from its own generator of the same seed."""

    @torch.no_grad()
    def draw(model):
        for i, p in enumerate(model.parameters()):
            nn.init.uniform_(p, generator=torch.Generator().manual_seed(i))

    assert_changes_as_plain(draw)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_of_whole_tensors(assign):
    other = models.make_model(seed=5).state_dict()
    if not assign:
        assert_changes_as_plain(lambda m: m.load_state_dict(other))
        return

    def rank(world):
        with engine_of(world, models.TinyModel) as engine, pytest.raises(ValueError, match="assign=True"):
            engine.module.load_state_dict({k: v.clone() for k, v in other.items()}, assign=True)
            engine.module(TOKENS, TARGETS).backward()
            engine.step()

    run_ranks(2, rank)


def test_state_dict_goes_back_into_its_own_model():
    def change(model):
        state = model.state_dict()
        kept = {name: value.clone() for name, value in state.items()}
        with torch.no_grad():
            model.h[0].up.weight.zero_()
        assert state["h.0.up.weight"].abs().sum() == 0  # it shares the parameter's memory, as torch's does
        model.load_state_dict(kept)

    assert_changes_as_plain(change)


def test_state_dict_tensors_serve_operators():
    def use(model):
        state = model.state_dict()
        total = sum(value.double().square().sum() for value in state.values())
        return total, torch.cat([value.flatten() for value in state.values()])

    total, flat = use(models.make_model())
    for (found_total, found_flat), *_ in on_ranks(use):
        assert torch.equal(found_total, total)
        assert torch.equal(found_flat, flat)


def test_state_dict_of_another_sharded_model():
    """A tensor of one engine copied into one of another: both units are brought in."""
    plain_loss, _ = on_plain(models.TinyModel, lambda m: m(TOKENS, TARGETS))

    def rank(world):
        with engine_of(world, lambda: models.TinyModel()) as one, engine_of(world, lambda: models.TinyModel()) as two:
            with torch.no_grad():
                for p in two.module.parameters():
                    p.zero_()
            two.module.load_state_dict(one.module.state_dict())
            return two.module(TOKENS, TARGETS).detach()

    for found in run_ranks(2, rank):
        assert torch.equal(found, plain_loss)


def test_deepcopy_gives_a_plain_whole_model():
    expected, expected_gradients = on_plain(models.TinyModel, lambda m: m(TOKENS, TARGETS))

    def rank(world):
        with engine_of(world, models.TinyModel) as engine:
            twin = copy.deepcopy(engine.module)
            with torch.no_grad():
                engine.module.h[0].up.weight.zero_()
            loss = twin(TOKENS, TARGETS)
            loss.backward()
            numbers = twin.h[0].up.weight.detach().numpy().sum()  # raw access: it is whole memory of its own
            assert twin.head.weight is twin.embed.weight
        # It outlives the engine.
        assert torch.equal(twin(TOKENS, TARGETS), loss)
        return loss.detach(), {name: p.grad for name, p in twin.named_parameters()}, numbers

    for loss, gradients, numbers in run_ranks(2, rank):
        assert torch.equal(loss, expected)
        assert_same_values(gradients, expected_gradients)
        assert numbers != 0


def test_averaged_model_follows():
    """An exponential average of the weights: a plain copy, updated from sharded ones."""

    def follow(model, step):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        average.update_parameters(model)
        model(TOKENS, TARGETS).backward()
        step()
        average.update_parameters(model)
        return {name: p.detach().clone() for name, p in average.module.named_parameters()}

    plain = models.make_model()
    expected = follow(plain, torch.optim.SGD(plain.parameters(), lr=0.1).step)

    def rank(world):
        with engine_of(world, models.TinyModel) as engine:
            return follow(engine.module, engine.step)

    for found in run_ranks(2, rank):
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-7)


def test_clones_and_casts_are_plain_tensors():
    plain = models.make_model()

    def rank(world):
        with engine_of(world, models.TinyModel) as engine, torch.no_grad():
            weight = engine.module.h[0].up.weight
            copies = [weight.clone(), weight.double(), weight.to(torch.bfloat16), weight[2:4].contiguous() + 0]
            copies.append(torch.empty_like(weight).copy_(weight))
            return [c.numpy(force=True) if c.dtype != torch.bfloat16 else c.float().numpy() for c in copies]

    weight = plain.h[0].up.weight.detach()
    expected = [weight, weight.double(), weight.bfloat16().float(), weight[2:4], weight]
    for found in run_ranks(2, rank):
        for f, e in zip(found, expected, strict=True):
            assert (f == e.numpy()).all()


def test_norms_over_all_parameters():
    def objective(model):
        parameters = list(model.parameters())
        together = torch.stack(torch._foreach_norm(parameters)).square().sum()
        return together + torch.nn.utils.parameters_to_vector(parameters).square().sum() + model(TOKENS, TARGETS)

    assert_as_plain(models.TinyModel, objective)


def test_comparison_and_reading_of_values():
    bias = models.make_model().h[0].up.bias

    def rank(world):
        with engine_of(world, models.TinyModel) as engine:
            weight = engine.module.h[0].up.bias
            with pytest.raises(RuntimeError, match=r"'h.0.up.bias'.*parameter.clone"):
                repr(weight)  # torch reads the memory itself here
            assert repr(weight.clone().detach()) == repr(bias.clone().detach())
            assert weight.clone().tolist() == bias.tolist()
            assert bool((weight == weight.clone()).all()) and torch.equal(weight, weight)
            return weight.sum().item(), weight[3].item(), f"{weight.norm():.6f}"

    for found in run_ranks(2, rank):
        assert found == (bias.sum().item(), bias[3].item(), f"{bias.norm():.6f}")


def test_a_new_optimizer_over_sharded_parameters_is_refused():
    """The engine takes the gradients, so that torch's own optimizer would step nothing."""

    def rank(world):
        with engine_of(world, models.TinyModel) as engine:
            stray = torch.optim.AdamW(engine.module.parameters(), lr=1.0)
            engine.module(TOKENS, TARGETS).backward()
            before = weights_of(engine)
            with pytest.raises(ConfigError, match=r"Call engine.step\(\)"):
                stray.step()
            assert_same_values(weights_of(engine), before)
            assert engine.step().applied

    run_ranks(2, rank)


def test_module_moves_and_casts_say_the_cure():
    """module.to(dtype) after initialize would take the parameters from the engine: the next step says so."""

    def rank(world):
        with engine_of(world, models.TinyModel) as engine:
            engine.module.double()
            with pytest.raises((ValueError, RuntimeError), match=r"'embed.weight'.*before initialize"):
                engine.module(TOKENS, TARGETS).backward()
                engine.step()

    run_ranks(2, rank)
