# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Activations that enter shared layers: one sum of gradients for all that take them, beside the weights' own."""

import gc
import weakref

import pytest
import torch
from conftest import run_ranks
from torch import nn

from deeptide.tensor import ColumnParallelLinear, RowParallelLinear, make_team
from deeptide.tensor.entry import _entries


class Core:
    """A team's, which tells what it does."""

    size, index, data_rank = 2, 0, 0

    def __init__(self):
        self.events = []

    def start_all_reduce(self, tensor, phase):
        self.events.append("begin")
        core = self

        class Sum:
            def wait(self):
                core.events.append("end")
                return 2 * tensor

        return Sum()

    def all_reduce(self, tensor, phase):
        self.events.append(phase)
        return 2 * tensor


class FakeTeam:
    size, index, data_rank = 2, 0, 0

    def __init__(self):
        self.core = Core()


def layers(team, names="qkv", **more):
    made = {name: ColumnParallelLinear(6, 6, team=team, **more) for name in names}
    for name, layer in made.items():
        layer.weight.register_post_accumulate_grad_hook(lambda _, name=name: team.core.events.append(name))
    return made


def test_one_sum_is_for_all_layers_and_travels_while_their_weights_gradients_are_computed():
    team = FakeTeam()
    q, k, v = layers(team).values()
    x = torch.randn(2, 3, 6, requires_grad=True)
    (q(x) * k(x) + v(x)).sum().backward()
    assert team.core.events[0] == "begin"
    assert team.core.events[-1] == "end"
    assert sorted(team.core.events[1:-1]) == ["k", "q", "v"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 6), (2, 3, 6), (2, 2, 3, 6)], ids=str)
def test_gradients_are_torchs_bit_for_bit(shape, dtype, bias):
    team = FakeTeam()
    layer = ColumnParallelLinear(6, 8, bias=bias, team=team).to(dtype)
    plain = nn.Linear(6, 4, bias=bias).to(dtype)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(shape).to(dtype).requires_grad_()
    x_plain = x.detach().clone().requires_grad_()
    y, y_plain = layer(x), plain(x_plain)
    given = torch.randn_like(y_plain)
    y.backward(given)
    y_plain.backward(given)
    assert torch.equal(y, y_plain)
    assert torch.equal(x.grad, 2 * x_plain.grad)
    for (name, p), q in zip(layer.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_what_is_written_between_two_layers_enters_again():
    team = FakeTeam()
    first, second = (layer.requires_grad_(False) for layer in layers(team, "ab").values())
    leaf = torch.randn(3, 6, requires_grad=True)
    x = leaf * 1
    a = first(x)
    x.mul_(3)
    (a + second(x)).sum().backward()
    assert team.core.events == ["begin", "end"] * 2
    torch.testing.assert_close(leaf.grad, 2 * (first.weight + 3 * second.weight).sum(0).expand(3, 6))


def test_nothing_is_kept_of_an_activation_that_is_gone():
    team = FakeTeam()
    (layer,) = layers(team, "a").values()
    before = len(_entries)
    x = torch.randn(3, 6, requires_grad=True) * 1
    entered = weakref.ref(x)
    layer(x).sum().backward()
    assert len(_entries) == before + 1
    del x
    gc.collect()
    assert entered() is None
    assert len(_entries) == before


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("goes_back", [True, False])
def test_nothing_is_kept_of_a_leaf_that_is_gone(goes_back, is_trained):
    team = FakeTeam()
    (layer,) = layers(team, "a").values()
    layer.weight.requires_grad_(is_trained)
    x = torch.randn(3, 6, requires_grad=True)
    entered = weakref.ref(x)
    y = layer(x)
    if goes_back:
        y.sum().backward()
    del x, y
    gc.collect()
    assert entered() is None


def test_frozen_weights_autocast_and_modes_take_torchs_own_product():
    team = FakeTeam()
    q, k = layers(team, "qk").values()
    q.weight.requires_grad_(False)
    x = torch.randn(3, 6, requires_grad=True)
    (q(x) + k(x)).sum().backward()
    assert team.core.events == ["begin", "k", "end"]
    with torch.autocast("cpu", torch.bfloat16):
        y = k(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert sorted(team.core.events[3:]) == ["begin", "end", "k"]
    torch.testing.assert_close(x.grad, 2 * (q.weight + 2 * k.weight).sum(0).expand(3, 6), rtol=0.02, atol=0.02)


def test_a_second_derivative_is_refused():
    team = FakeTeam()
    (layer,) = layers(team, "a").values()
    x = torch.randn(3, 6, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def recomputed(world, reentrant):
    team = make_team(world.size, world, 60.0)
    torch.manual_seed(1)
    up, gate = (ColumnParallelLinear(6, 8, team=team) for _ in range(2))
    down = RowParallelLinear(8, 6, team=team)
    results = []
    for checkpoints in (False, True):
        x = torch.linspace(-1, 1, 36).view(2, 3, 6).requires_grad_()

        def block(h):
            h = h * 1
            return down(up(h) * gate(h))

        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant) if checkpoints else block(x)
        y.square().sum().backward()
        results.append([x.grad, *(p.grad.clone() for layer in (up, gate, down) for p in layer.parameters())])
        for layer in (up, gate, down):
            layer.zero_grad()
    return all(map(torch.equal, *results))


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_computed_again_give_the_same_bits(reentrant):
    assert all(run_ranks(2, recomputed, reentrant))
