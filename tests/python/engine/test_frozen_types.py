# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters of types that are not floating, as a quantized base has them, stay whole beside what is trained."""

import edges
import models
import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide


class Quantized(nn.Module):
    """A base of packed bytes with a scale, and an adapter beside it, as QLoRA has them."""

    def __init__(self, width=6):
        super().__init__()
        packed = torch.randint(0, 255, (width, width), dtype=torch.uint8)
        self.base = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(torch.full((width, 1), 0.01), requires_grad=False)
        self.steps = nn.Parameter(torch.tensor([3, 4], dtype=torch.int32), requires_grad=False)
        self.phase = nn.Parameter(torch.randn(width, dtype=torch.complex64), requires_grad=False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x):
        weight = (self.base.to(x.dtype) - 127) * self.scale.to(x.dtype)
        turned = (x.float() * self.phase).real.to(x.dtype)
        return x @ weight.t() * self.steps[0] + self.up(self.down(x)) + turned


FROZEN = ("base", "steps", "phase")


def train(world, stage, bf16, folder):
    engine = edges.start(world, stage, kind=Quantized, bf16=bf16)
    before = {name: getattr(engine.module, name).detach().clone() for name in FROZEN}
    edges.train(engine, 3, rank=world.rank)
    for name in FROZEN:
        now = getattr(engine.module, name)
        assert now.dtype == before[name].dtype and torch.equal(now, before[name])
    engine.save_checkpoint(folder)
    engine.save_checkpoint(folder, tag="adapter", exclude_frozen_parameters=True, save_latest=False)
    state = engine.module_state_dict()
    assert set(FROZEN) < state.keys()
    with torch.no_grad():
        for name in FROZEN:
            getattr(engine.module, name).zero_()
    engine.load_checkpoint(folder, tag="adapter")  # leaves them as they are
    assert not any(getattr(engine.module, name).any() for name in FROZEN)
    engine.load_checkpoint(folder)
    for name in FROZEN:
        assert torch.equal(getattr(engine.module, name), before[name])
    return edges.final_state(engine)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", edges.STAGES)
def test_an_adapter_beside_a_quantized_base_trains_as_in_plain_torch(stage, bf16, tmp_path):
    states = run_ranks(2, train, stage, bf16, str(tmp_path))
    model, optimizer = edges.plain(Quantized)
    if bf16:
        return
    for step in range(3):
        edges.plain_step(model, optimizer, step, ranks=2)
    for name, parameter in model.named_parameters():
        for state in states:
            torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-5, atol=1e-6)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
        self.linear = nn.Linear(4, 3)


class Real(Complex):
    """Follows the advice of the error."""

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.view_as_real(self.phase.detach()).clone())

    def forward(self, x):
        return (self.linear(x) * torch.view_as_complex(self.phase).abs().sum(1)).sum()


def test_a_trained_complex_parameter_is_refused_with_a_cure_that_works():
    text = (
        r"'phase' is trainable and of type ComplexFloat.*view_as_real\(value\), of shape \[3, 4, 2\].*view_as_complex"
    )
    with pytest.raises(ValueError, match=text):
        edges.start(kind=Complex)
    engine = edges.start(kind=Real)
    before = engine.module.phase.detach().clone()
    engine.backward(engine(torch.ones(2, 4)))
    assert engine.step().applied and not torch.equal(engine.module.phase, before)
    engine.destroy()


def test_a_frozen_parameter_built_under_zero_init_has_its_values():
    with deeptide.zero.Init():
        model = models.make_model(kind=Quantized)
    expected = models.make_model(kind=Quantized)
    engine = edges.start(model=model, stage=3)
    for name in FROZEN:
        assert torch.equal(getattr(engine.module, name), getattr(expected, name))
    engine.destroy()
