# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The gate under modules of many kinds: sharded parameters give the bits that whole ones give."""

import models
import pytest
import torch
from conftest import run_ranks
from gated import assert_as_plain, engine_of, inputs
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.apart

TOKENS, TARGETS = models.batches(1, 2)[0]


class Stack(nn.Module):
    """Three blocks over one `make()` each, summed to a scalar by a head."""

    def __init__(self, make, width):
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(3))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            x = y[0] if isinstance(y, tuple) else y
        return self.head(x).square().mean()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_gpt_gives_the_same_bits(tied, world):
    assert_as_plain(lambda: models.TinyModel(tied=tied), lambda m: m(TOKENS, TARGETS), world)


def test_parameter_tied_by_two_names_and_two_tensors():
    def build():
        model = models.TinyModel(tied=False)
        # Another Parameter over the same memory, as some models tie: two TensorImpls.
        model.head.weight = nn.Parameter(model.embed.weight.detach())
        return model

    def objective(model):
        return model(TOKENS, TARGETS)

    def plain():
        model = models.make_model(kind=lambda: models.TinyModel(tied=True))
        loss = objective(model)
        loss.backward()
        return loss, model.embed.weight.grad

    def rank(world):
        with engine_of(world, build) as engine:
            loss = objective(engine.module)
            loss.backward()
            return loss.detach(), engine._core.full_state("embed.weight", "gradient")

    loss, gradient = plain()
    for found, found_gradient in run_ranks(2, rank):
        # The untied draw differs from the tied one only in the head, which is replaced here.
        assert torch.equal(found, loss)
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-6, atol=1e-8)  # two uses, summed in another order


def test_parameter_used_outside_its_module():
    def objective(model):
        tokens, targets = TOKENS.to(models.DEVICE), TARGETS.to(models.DEVICE)
        x = F.embedding(tokens, model.embed.weight * 2)
        penalty = sum(p.square().sum() for p in model.parameters())
        direct = x @ model.h[1].up.weight.t() + model.h[1].up.bias
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) + 1e-3 * penalty + direct.mean()

    assert_as_plain(models.TinyModel, objective)


def test_views_are_kept_across_forward():
    def objective(model):
        if not hasattr(model, "kept"):
            # Views made before, outside any graph, and used after others came and went.
            model.kept = [block.down.weight.detach()[3:7].t() for block in model.h]
        live = [block.up.weight.view(3, -1)[1] for block in model.h]
        loss = model(TOKENS, TARGETS)
        rows = sum(v.sum() for v in live)
        return loss + rows + sum(k.square().sum() for k in model.kept)

    assert_as_plain(models.TinyModel, objective)


def test_lstm():
    def objective(m):
        return m(inputs(5, 3, 12))

    assert_as_plain(lambda: Stack(lambda: nn.LSTM(12, 12, num_layers=2), 12), objective)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_other_recurrent_modules(kind):
    assert_as_plain(lambda: Stack(lambda: kind(12, 12), 12), lambda m: m(inputs(5, 3, 12)))


def test_convolutions_and_batch_norm():
    def block():
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(block() for _ in range(3))
            self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)

        def forward(self, x):
            for b in self.blocks:
                x = b(x)
            return self.up(x).square().mean()

    assert_as_plain(Net, lambda m: m(inputs(2, 8, 9, 9)))


def test_batch_norm_keeps_its_running_statistics():
    def build():
        return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 3, 3))

    plain = models.make_model(kind=build)
    plain(inputs(2, 3, 8, 8))

    def rank(world):
        with engine_of(world, build) as engine:
            engine.module(inputs(2, 3, 8, 8)).mean().backward()
            engine.step()
            return engine.module_state_dict()

    for state in run_ranks(2, rank):
        assert torch.equal(state["1.running_mean"], plain[1].running_mean)
        assert torch.equal(state["1.num_batches_tracked"], plain[1].num_batches_tracked)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(need_weights):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=need_weights)

    assert_as_plain(lambda: Stack(Attention, 16), lambda m: m(inputs(2, 7, 16)))


def test_transformer_encoder_in_evaluation_takes_the_fast_path():
    def build():
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2)

    plain = models.make_model(kind=build).eval()
    with torch.no_grad():
        expected = plain(inputs(2, 5, 16))

    def rank(world):
        with engine_of(world, build) as engine, torch.no_grad():
            return engine.module.eval()(inputs(2, 5, 16))

    for found in run_ranks(2, rank):
        assert torch.equal(found, expected)


class Lora(nn.Module):
    def __init__(self, base_dtype=torch.float32):
        super().__init__()
        self.base = nn.Linear(24, 24).to(base_dtype).requires_grad_(False)
        self.down = nn.Linear(24, 2, bias=False)
        self.up = nn.Linear(2, 24, bias=False)

    def forward(self, x):
        base = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return x + base + self.up(self.down(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_frozen_base_with_trained_adapters(dtype):
    assert_as_plain(lambda: Stack(lambda: Lora(dtype), 24), lambda m: m(inputs(3, 24)))


def test_parameters_of_several_types():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low = nn.Linear(10, 10).bfloat16().requires_grad_(False)
            self.full = nn.Linear(10, 10)
            self.wide = nn.Linear(10, 10).double().requires_grad_(False)

        def forward(self, x):
            x = self.low(x.bfloat16()).float() + x
            return self.wide(self.full(x).double()).float()

    assert_as_plain(lambda: Stack(Mixed, 10), lambda m: m(inputs(4, 10)))


@pytest.mark.parametrize("world", [2, 4])
def test_parameters_of_no_and_of_one_element(world):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0, 5))
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.shift = nn.Parameter(torch.full((1,), 0.25))

        def forward(self, x):
            return torch.cat([x, self.none]).sum(0) * self.scale + self.shift

    assert_as_plain(Small, lambda m: m(inputs(3, 5)).square().mean(), world)


def test_world_is_larger_than_the_model():
    """Three elements on four ranks: the padding is most of each unit, and some ranks own nothing."""
    assert_as_plain(lambda: nn.Linear(2, 1), lambda m: m(inputs(3, 2)).square().mean(), world=4)


def test_only_parameter_has_no_element():
    def build():
        model = nn.Linear(2, 1)
        model.empty = nn.Parameter(torch.empty(0))
        return model

    assert_as_plain(build, lambda m: m(inputs(3, 2)).square().mean() + m.empty.sum())


def test_unused_and_conditional_parameters():
    def objective(model):
        x = model.embed(TOKENS)
        x = model.h[2](x)  # h.0 and h.1 get no gradient
        return F.cross_entropy(model.head(x).flatten(0, 1), TARGETS.to(x.device).flatten())

    assert_as_plain(models.TinyModel, objective)
