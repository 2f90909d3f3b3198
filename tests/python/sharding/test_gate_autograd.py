# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The gate under autograd's own ways: recomputation, autocast, grad(), double backward, functions, transforms."""

import models
import pytest
import torch
from conftest import run_processes, run_ranks
from gated import assert_as_plain, assert_same_gradients, engine_of, gradients_of, inputs, on_plain, on_rank
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import deeptide

pytestmark = pytest.mark.apart

TOKENS, TARGETS = models.batches(1, 2)[0]


def cross_entropy(model, x):
    return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), TARGETS.to(x.device).flatten())


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    def objective(model):
        x = model.embed(TOKENS)
        for block in model.h:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return cross_entropy(model, x)

    assert_as_plain(models.TinyModel, objective)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_of_segments_and_nested(reentrant):
    def objective(model):
        def nested(x):
            return checkpoint(model.h[1], checkpoint(model.h[0], x, use_reentrant=reentrant), use_reentrant=reentrant)

        x = checkpoint(nested, model.embed(TOKENS), use_reentrant=reentrant)
        x = checkpoint_sequential([model.h[2], model.h[0]], 2, x, use_reentrant=reentrant)
        return cross_entropy(model, x)

    assert_as_plain(models.TinyModel, objective)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, cache):
    def objective(model):
        with torch.autocast("cpu", dtype=dtype, cache_enabled=cache):
            # The second use takes the cast from autocast's cache.
            return model(TOKENS, TARGETS) + model(TOKENS.flip(0), TARGETS.flip(0))

    assert_as_plain(models.TinyModel, objective)


def test_autocast_with_checkpointing():
    def objective(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = model.embed(TOKENS)
            for block in model.h:
                x = checkpoint(block, x, use_reentrant=False)
            return cross_entropy(model, x)

    assert_as_plain(models.TinyModel, objective)


def test_saved_tensor_hooks():
    def objective(model):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return model(TOKENS, TARGETS)

    assert_as_plain(models.TinyModel, objective)


def test_save_on_cpu():
    def objective(model):
        with torch.autograd.graph.save_on_cpu():
            return model(TOKENS, TARGETS)

    assert_as_plain(models.TinyModel, objective)


def test_functional_call_with_replaced_and_with_own_parameters():
    def objective(model):
        own = dict(model.named_parameters())
        doubled = {name: p * 2 for name, p in own.items() if "up" in name}
        first = torch.func.functional_call(model, own, (TOKENS, TARGETS))
        return first + torch.func.functional_call(model, doubled, (TOKENS, TARGETS))

    assert_as_plain(models.TinyModel, objective)


def test_autograd_grad_of_parameters():
    """grad() returns whole gradients and leaves none for the step."""
    plain = models.make_model()
    expected = torch.autograd.grad(plain(TOKENS, TARGETS), list(plain.parameters()))

    def rank(world):
        with engine_of(world, models.TinyModel) as engine:
            parameters = list(engine.module.parameters())
            found = torch.autograd.grad(engine.module(TOKENS, TARGETS), parameters)
            return found, set(gradients_of(engine).values())

    for found, left in run_ranks(2, rank):
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
        assert left == {None}


def test_autograd_grad_of_inputs():
    def objective(model):
        x = model.embed(TOKENS).detach().requires_grad_()
        loss = cross_entropy(model, model.h[1](model.h[0](x)))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()  # a gradient penalty: backward through backward

    assert_as_plain(models.TinyModel, objective)


def test_double_backward_through_parameters():
    def objective(model):
        loss = model(TOKENS, TARGETS)
        slopes = torch.autograd.grad(loss, [model.h[0].up.weight, model.h[2].down.weight], create_graph=True)
        return loss + sum(s.square().sum() for s in slopes)

    assert_as_plain(models.TinyModel, objective)


def test_backward_with_retained_graph_adds_up():
    def build_and_run(model, step):
        loss = model(TOKENS, TARGETS)
        loss.backward(retain_graph=True)
        loss.backward()
        return step(model)

    plain = models.make_model()
    expected = build_and_run(plain, lambda m: {n: p.grad for n, p in m.named_parameters()})

    def rank(world):
        with engine_of(world, models.TinyModel) as engine:
            return build_and_run(engine.module, lambda m: gradients_of(engine))

    for found in run_ranks(2, rank):
        assert_same_gradients(found, expected)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2), gradient.flatten(0, -2).sum(0)


def test_custom_function():
    def objective(model):
        x = model.embed(TOKENS)
        for block in model.h:
            x = x + block.down(F.gelu(Scaled.apply(block.norm(x), block.up.weight, block.up.bias)))
        return cross_entropy(model, x)

    assert_as_plain(models.TinyModel, objective)


def test_parameter_hooks_see_whole_gradients():
    def objective(model):
        if not hasattr(model, "seen"):
            model.seen = []
            model.h[1].up.weight.register_hook(lambda g: model.seen.append(g.shape) or g * 0.5)
        return model(TOKENS, TARGETS)

    assert_as_plain(models.TinyModel, objective)


def test_vmap_over_inputs():
    def objective(model):
        x = model.embed(TOKENS)
        rows = torch.func.vmap(lambda row: model.h[0](row).square().mean())(x)
        return rows.sum() + cross_entropy(model, model.h[1](x))

    assert_as_plain(models.TinyModel, objective)


def with_tangents(model):
    x = model.embed(TOKENS).detach()
    _, tangent = torch.func.jvp(model.h[0], (x,), (torch.ones_like(x),))
    return tangent.square().mean() + model(TOKENS, TARGETS)


def under_anomaly_mode(model):
    with torch.autograd.detect_anomaly():
        return model(TOKENS, TARGETS)


def compare_in_process(objective):
    deeptide.init_distributed()
    torch.set_num_threads(1)
    objective = globals()[objective]
    loss, gradients = on_plain(models.TinyModel, objective)
    found, found_gradients, _ = on_rank(None, models.TinyModel, objective, {})
    assert torch.equal(found, loss)
    assert_same_gradients(found_gradients, gradients)


@pytest.mark.parametrize("objective", [with_tangents, under_anomaly_mode])
def test_modes_that_threads_would_share(objective):
    """In processes: torch keeps forward-mode levels and the anomaly flag once for all threads."""
    run_processes(2, compare_in_process, objective.__name__)


@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "jacrev"])
def test_transforms_of_functions_of_the_parameters(transform):
    """torch.func hands whole results out, as on a plain model."""

    def compute(model):
        weights = {name: p.detach() for name, p in model.h[0].named_parameters()}
        x = inputs(4, 20)

        def loss(w, row):
            return torch.func.functional_call(model.h[0], w, (row,)).square().mean()

        if transform == "grad":
            return torch.func.grad(loss)(weights, x)
        if transform == "jacrev":
            return torch.func.jacrev(lambda w: torch.func.functional_call(model.h[0], w, (x[:1],)))(weights)
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)

    expected = compute(models.make_model())

    def rank(world):
        with engine_of(world, models.TinyModel) as engine:
            return compute(engine.module)

    for found in run_ranks(2, rank):
        assert_same_gradients(found, expected)


def test_an_operator_that_throws_leaves_nothing_pinned():
    def rank(world):
        with engine_of(world, models.TinyModel) as engine:
            with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch"):
                engine.module.h[0].up(torch.ones(2, 3))
            engine.module(TOKENS, TARGETS).backward()
            assert engine.step().applied
            engine.empty_partition_cache()
            return engine._core.live_gathered_bytes()

    assert run_ranks(2, rank) == [0, 0]


def test_weight_norm_and_spectral_norm():
    def build():
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        nn.utils.parametrizations.weight_norm(model[0])
        nn.utils.parametrizations.orthogonal(model[2])
        return model

    assert_as_plain(build, lambda m: m(inputs(3, 8)).square().mean())
